"""The soak's section of the results. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from bench.soak.checks import WAIT
from bench.soak.drive import Outcome
from bench.soak.plan import FAULTS

LEGEND = {
    "norm": "BatchNorm",
    "dropout": "dropout",
    "accumulate": "BatchNorm, gradients of 3 batches added up",
    "loaders": "dropout, 2 loader workers",
    "pair": "two models, LSTM and dropout",
    "scaler": "BatchNorm, gradient scaler",
    "gan": "GAN: generator and discriminator, two backward passes",
    "large": "a state of 17 MB",
    "phases": "a loop over epochs, then another one with a higher learning rate",
    "trainer": "a Trainer of Hugging Face: BatchNorm, dropout, accumulation, evaluation",
    "lightning": "a Trainer of PyTorch Lightning: as above, and a schedule that follows the validation",
}


def render(outcomes: Sequence[Outcome], machine: str, day: str) -> str:
    """The section: a row for each kind of job, then each kind of fault, then the seeds that failed."""
    seeds = [outcome.scenario.seed for outcome in outcomes]
    failed = [outcome for outcome in outcomes if outcome.problems]
    lines = [
        "## Soak: random faults",
        "",
        f"{len(outcomes)} runs, seeds {min(seeds)} to {max(seeds)}: {len(outcomes) - len(failed)} held,"
        f" {len(failed)} failed. Commit {_commits(outcomes)}, {day}, {machine}."
        f" `make soak RUNS={len(outcomes)} SEED={min(seeds)}`.",
        "",
        "A run held if: final weights and optimizer state are bit-equal to the undisturbed run (jobs of fixed size);"
        " every sample is seen once in each epoch; no wait is longer than the work that it could save plus"
        f" {WAIT:g} s; no failure is counted; no process, port, folder in memory, mount or machine is left.",
        "Every job has an AdamW optimizer and a learning rate schedule for each model.",
        "",
        "| job | runs | failed | interruptions | steps done again | longest recovery (median, most) |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(outcome.scenario.shape.name for outcome in outcomes):
        lines.append(_row(LEGEND[name], [each for each in outcomes if each.scenario.shape.name == name]))
    lines.append(_row("all", list(outcomes)))
    if gpu := [outcome for outcome in outcomes if outcome.scenario.gpu]:
        lines.append(_row("of these, as on GPUs (`bench/soak/job/as_gpu.py`)", gpu))
        if exact := [outcome for outcome in gpu if outcome.scenario.exact]:
            lines.append(_row("as on GPUs, with `exact: true`", exact))
    counted = Counter(fault.kind for outcome in outcomes for fault in outcome.done)
    lines += ["", "Faults: " + ", ".join(f"{kind} {counted[kind]}" for kind in FAULTS) + "."]
    for outcome in failed:
        lines += ["", f"Seed {outcome.scenario.seed}: {outcome.problems[0].strip().splitlines()[-1]}"]
    return "\n".join(lines)


def _commits(outcomes: Sequence[Outcome]) -> str:
    """The commits of the runs; a soak that was resumed may have several."""
    found = list(dict.fromkeys(outcome.commit or "unknown" for outcome in outcomes))
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _row(name: str, outcomes: Sequence[Outcome]) -> str:
    waits = [outcome.longest for outcome in outcomes]
    cells = [
        name,
        str(len(outcomes)),
        str(sum(bool(outcome.problems) for outcome in outcomes)),
        str(sum(outcome.interruptions for outcome in outcomes)),
        str(sum(outcome.lost for outcome in outcomes)),
        f"{statistics.median(waits):.1f} s, {max(waits):.1f} s",
    ]
    return f"| {' | '.join(cells)} |"
