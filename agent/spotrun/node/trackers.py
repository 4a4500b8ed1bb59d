"""Variables for other programs that keep metrics, so that an interrupted job is one run in these programs. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def variables(job: str, env: Mapping[str, str]) -> dict[str, str]:
    """What a job's workers get if its `env` sets up such a program. All generations of a job have the same values.

    Weights & Biases continues the run with this id (https://docs.wandb.ai/guides/runs/resuming). MLflow chooses the ids
    of its runs. So the variable for MLflow is a name, by which the script can find the run again.
    """
    found: dict[str, str] = {}
    if any(name.startswith("WANDB_") for name in env):
        found |= {"WANDB_RUN_ID": job, "WANDB_RESUME": "allow"}
    if any(name.startswith("MLFLOW_") for name in env):
        found["MLFLOW_RUN_NAME"] = job
    return found
