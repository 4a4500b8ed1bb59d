"""A small training run that leaves behind what tests ask about: sample ids of every step, a digest of the final state.

It runs under `python`, `torchrun` and spotrun. `--out` is a folder that all ranks can write to.
"""

import argparse
import fcntl
import hashlib
import itertools
import json
import os
import resource
import signal
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spotrun

LAG = 0.3  # seconds by which a slow rank's step is longer
LONGEST = 10.0  # seconds of a slow step: a machine that is taken gets about 30 s to end its step

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--samples", type=int, default=600)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--pause", type=float, default=0.02, help="seconds added to each step")
parser.add_argument("--slow", type=int, default=0, help="step from which on each is slow, until OUT/go is there")
parser.add_argument("--step", type=float, default=0.3, help="seconds of a slow step; OUT/step may say others")
parser.add_argument("--stretch", type=float, default=0.5, help="part of the job in which slow steps get ever longer")
parser.add_argument("--drag", type=float, default=0.0, help="seconds added to each step from the order to stop on")
parser.add_argument("--fail", default="", help="rank@step: raise there, each time")
parser.add_argument("--hang", default="", help="rank@step: stop there, the first time")
parser.add_argument("--lag", type=int, default=-1, help="a rank that is slow until OUT/go is there")
parser.add_argument("--flood", type=int, default=0, help="lines to print each second")
parser.add_argument("--fill", action="store_true", help="do nothing but fill the memory that all jobs share")
parser.add_argument("--largest", type=int, default=0, help="bytes that a file may have, as if its disk were full")
parser.add_argument("--late", type=float, default=0.0, help="seconds before it joins the others")
parser.add_argument("--gpu", action="store_true", help="imitate a GPU: see bench/soak/job/as_gpu.py")
parser.add_argument(
    "--leave",
    type=Path,
    help="a folder for the digest, at the end, and for event files",
)
parser.add_argument("--find", type=Path, help="a folder in which another job has left a digest; it is copied to OUT")
args = parser.parse_args()
if args.find:
    (args.out / "found").write_text((args.find / "digest").read_text())

context = json.loads(os.environ.get("SPOTRUN_CONTEXT", "{}"))


def hold_device():
    """Fail if a worker of another job uses the same device. The file, and so the lock, is open until the end."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if not context or local_rank >= len(devices):
        return None
    file = (args.out.parent / f"device-{context['node']}-{devices[local_rank]}").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        print(context["job"], file=file, flush=True)
    except BlockingIOError:
        file.seek(0)
        user = file.read().strip()
        if user != context["job"]:
            raise RuntimeError(f"{file.name} is used by {user}") from None
    return file


def slow_step():
    """Sleep until the step is over. In the last part of the job, each takes longer, so that it waits for OUT/go."""
    began = time.monotonic()
    file, go = args.out / "step", args.out / "go"
    seconds = float(file.read_text()) if file.exists() else args.step
    left = 1 - (run.epoch + sampler.position / args.samples) / args.epochs
    seconds *= max(1.0, args.stretch / max(left, 1e-9))
    while not go.exists() and (rest := began + min(seconds, LONGEST) - time.monotonic()) > 0:
        time.sleep(min(rest, 0.2))


flooded = threading.Event()  # it is set once as many lines are out as `flood` asks for in a second


def print_lines():
    lines = (b"a line of a script that says too much\n") * (args.flood // 10)
    for number in itertools.count(1):
        os.write(1, lines)
        if number == 10:
            flooded.set()
        time.sleep(0.1)


def fill_memory():
    folder = Path(context["slots"]).parent
    for number in itertools.count():
        try:
            (folder / f"file{number}").write_bytes(bytes(1 << 20))
        except OSError:
            time.sleep(0.01)


device = hold_device()
if args.gpu:
    import as_gpu  # type: ignore[import-not-found]  # the harness puts it beside this script

    as_gpu.imitate()
if args.fill:
    fill_memory()
if args.flood:
    threading.Thread(target=print_lines, daemon=True).start()
(args.out / f"begun@{context.get('node')}@{os.getpid()}").touch()
time.sleep(args.late)
with (args.out / "setups").open("a") as setups:
    print(os.getpid(), file=setups)
(args.out / f"set-up-{os.getpid()}").write_text(str(time.time()))
if args.largest:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (args.largest, args.largest))
run = spotrun.init(seed=1)
generator = torch.Generator().manual_seed(0)
inputs = torch.randn(args.samples, 16, generator=generator)
dataset = TensorDataset(torch.arange(args.samples), inputs, inputs[:, :4].argmax(1))
model = run.ddp(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.Linear(32, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if args.gpu:
    as_gpu.hold([model], [optimizer])
sampler = spotrun.ElasticSampler(dataset, seed=3)
loader = DataLoader(dataset, batch_size=args.batch, sampler=sampler)
run.track(model=model, optimizer=optimizer, sampler=sampler)
if args.leave:  # as torch.utils.tensorboard would write it
    args.leave.mkdir(parents=True, exist_ok=True)
    (args.leave / f"events.out.tfevents.{os.getpid()}").write_text("one event\n")
record = (args.out / f"steps-{run.generation}-{run.rank}.jsonl").open("a", buffering=1)


def here(place: str) -> bool:
    rank, _, step = place.partition("@")
    return bool(place) and run.rank == int(rank) and run.step + 1 == int(step)


def hang():
    while True:
        time.sleep(3600)


for epoch in run.epochs(args.epochs):
    for ids, x, y in run.steps(loader):
        if here(args.fail):
            raise ValueError(f"bad luck at step {run.step + 1}")
        if here(args.hang) and not (args.out / "hung").exists():
            (args.out / "hung").touch()
            hang()
        # Before its gradient can reach anybody: a node may be taken at any later point and the step count all the same.
        seen = [] if run.padding else ids.tolist()
        line = {"generation": run.generation, "epoch": epoch, "step": run.step + 1, "ids": seen}
        line |= {"rank": run.rank, "pid": os.getpid(), "at": time.time()}
        record.write(json.dumps(line) + "\n")
        if run.rank == args.lag and not (args.out / "go").exists():
            time.sleep(LAG)
        while (hold := args.out / "hold").exists() and run.generation > int(hold.read_text()):
            time.sleep(0.02)
        loss = nn.functional.cross_entropy(model(x), y)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss, weight=next(model.parameters()).detach().sum())
        slow = args.slow and run.step >= args.slow and not (args.out / "go").exists()
        if slow:
            slow_step()
        else:
            time.sleep(args.pause)
        if args.drag and run._control.stop_at > run.step:
            time.sleep(args.drag)
    run.log(norm=sum(parameter.detach().square().sum() for parameter in model.parameters()))

if args.flood:
    flooded.wait(300)
digest = hashlib.sha256()
for tensor in model.state_dict().values():
    digest.update(tensor.numpy().tobytes())
for state in optimizer.state_dict()["state"].values():
    for value in state.values():
        digest.update(value.numpy().tobytes())
result = {"world_size": run.world_size, "step": run.step, "digest": digest.hexdigest(), "pid": os.getpid()}
(args.out / f"final-{run.rank}.json").write_text(json.dumps(result))
if args.leave and run.rank == 0:
    (args.leave / "digest").write_text(result["digest"])
print("finished", result)
