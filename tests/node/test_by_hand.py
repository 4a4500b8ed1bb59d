"""The file with which a person runs a job's script as a worker did."""

from __future__ import annotations

import asyncio
import json
import stat
import subprocess
import sys
from pathlib import Path

from spotrun.node import by_hand
from tests.fakes.node import changed, world
from tests.helpers import await_for

A = "node-a"
ENVIRONMENT = {
    "PATH": "/bin:/usr/bin",
    "HOME": "/home/of the agent",
    "TONE": 'it\'s "$HOME" `x`\nand more',
    "CUDA_VISIBLE_DEVICES": "1,2",
    "SPOTRUN_RESTARTS": "3",
    "SPOTRUN_CONTEXT": "of a generation that has ended",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "NOTIFY_SOCKET": "/run/systemd/notify",
    "STATE_DIRECTORY": "/var/lib/spotrun",
    "USER": "spotrun",
    "BASH_FUNC_x%%": "() { :; }",
}


def sourced(path: Path) -> dict[str, str]:
    """The environment of a program after a shell has read the file."""
    show = f"{sys.executable} -c 'import json, os; print(json.dumps(dict(os.environ)))'"
    done = subprocess.run(["sh", "-c", f'. "$1" && {show}', "-", str(path)], env={}, capture_output=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_a_shell_gets_the_environment_of_a_worker_that_is_alone(tmp_path: Path) -> None:
    path = tmp_path / "env.sh"
    by_hand.write(path, ENVIRONMENT)
    by_hand.write(path, ENVIRONMENT)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = sourced(path)
    for name in ("HOME", "TONE", "CUDA_VISIBLE_DEVICES", "SPOTRUN_RESTARTS"):
        assert found[name] == ENVIRONMENT[name]
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_PORT"]) == ("0", "1", "0")
    assert found["PATH"] == f"{Path(sys.executable).parent}:/bin:/usr/bin"
    assert found.keys().isdisjoint({"SPOTRUN_CONTEXT", "NOTIFY_SOCKET", "STATE_DIRECTORY", "USER", "BASH_FUNC_x%%"})


async def test_a_node_says_where_the_job_is_and_keeps_it_until_the_head_lets_go(tmp_path: Path) -> None:
    async with world(tmp_path, A, environment={"TONE_OF_AGENT": "calm", "SPOTRUN_DEVICES": "2"}) as w:
        (machine,) = w.machines
        bundle = w.bundle("--fail", "0@3@1", keep_on_failure=600, env={"TONE": "loud"}, procs_per_node=1)
        await w.ready(bundle, [A])
        order = await w.begin(bundle, 1, [A], devices=(1,))
        (failed,) = await w.phase([A], 1, "failed")
        place = failed.work.place
        assert place is not None
        found = await asyncio.to_thread(sourced, Path(place.env))
        wanted = {"TONE": "loud", "TONE_OF_AGENT": "calm", "CUDA_VISIBLE_DEVICES": "1", "SPOTRUN_RESTARTS": "0"}
        assert wanted.items() <= found.items()
        assert "bad luck on rank 0" in (Path(place.logs) / "0.log").read_text()

        await w.head.order(A, changed(order, generation=None))
        kept = await w.head.wait(A, lambda r: r.phase == "ready", "ready")
        assert (kept.work.devices, kept.workers) == ((), ()), "the devices are free for a person"
        assert Path(place.env).exists()
        assert (Path(place.folder) / "src/train.py").exists()

        plain = w.bundle()
        await w.ready(plain, [A])  # in an order without the other job
        await w.begin(plain, 1, [A])
        (running,) = await w.steps([A], 1, 1)
        assert running.work.place is None, "nobody will ask for it"
        await w.ready(w.bundle(), [A])  # what jobs have left goes when another one comes
        await await_for(lambda: not Path(place.env).parent.exists(), what="the folder of the job to go")
        assert not (machine.tmpfs / bundle.id).exists()
