"""A cluster that goes down and comes up again with a job on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import site as sites
from spotrun.errors import SpotrunError
from tests.e2e.conftest import SPEC
from tests.e2e.harness import running, sample_ids


def test_down_and_up_with_a_job(tmp_path: Path) -> None:
    """With its head dead, the cluster is not taken down by mistake; up again, the job waits for its operator."""
    keys = {**SPEC, "name": "down", "local": {"boot_delay": 0.1, "recreate_delay": 3600}}
    with running(tmp_path, keys) as harness:
        spec = harness.spec
        job = harness.submit(epochs=1, samples=400, batch=4, slow=60, checkpoint_interval=1)
        harness.until(lambda s: s["job"]["checkpoint"], "a checkpoint")
        harness.kill_head()
        with pytest.raises(SpotrunError, match=f"not ended yet: {job.id}; "):
            sites.take_down(sites.site(spec), force=False)
        assert "is down" in sites.take_down(sites.site(spec), force=True)
        status = sites.site(spec).up()
        assert (status["job"], status["held"]) == (None, [job.id])
        assert [(each["job"], each["phase"]) for each in harness.ctl("jobs")] == [(job.id, "held")]
        assert [pool["target"] for pool in harness.status()["pools"]] == [0]
        job.go()
        harness.access = sites.site(spec).access()
        harness.ctl("relaunch", "--job", job.id)
        assert harness.until_ended()["phase"] == "succeeded"
        assert sample_ids(job.out, 1) == {0: list(range(400))}
