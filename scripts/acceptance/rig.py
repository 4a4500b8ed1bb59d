"""The cluster that an acceptance tries, in its present form, and the jobs that run on it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts import control, jobs
from scripts import site as sites
from scripts.acceptance import plan, trace
from scripts.acceptance.jobs import Plan, plans
from scripts.acceptance.record import Facts
from scripts.acceptance.steps import STEPS, Stage, Step
from scripts.acceptance.trace import Trace
from scripts.cloud_site import END
from scripts.ssh import HEAD, Access
from spotrun.errors import SpotrunError
from spotrun.spec import ClusterSpec

_AGAIN = 5.0  # seconds between two looks at machines that are given back
_IGNORED = shutil.ignore_patterns("__pycache__", "*.yaml")


class Rig:
    """One acceptance's cluster, as the operator named it, and its jobs."""

    def __init__(self, cluster: ClusterSpec, file: str, folder: Path, wanted: Sequence[Step]) -> None:
        self.cluster, self.file = cluster, file
        self.folder = folder  # for files on this computer
        self._wanted = wanted  # the steps of this run; their jobs can be queued early
        self.facts_of: Callable[[str], Facts] = lambda step: {}  # what a step has measured, in any run
        self._plans = plans(cluster.cloud)
        self._submitted: dict[str, str] = {}
        self._seen: dict[str, Trace | SpotrunError] = {}
        self._standing: sites.Site | None = None

    def site(self, stage: Stage) -> sites.Site:
        """The cluster in the form that a stage needs. Writes a cluster file, unless it is the operator's own."""
        found = plan.cluster_of(self.cluster, stage)
        if found is self.cluster:
            return sites.site(found, self.file)
        file = self.folder / ("moved.yaml" if stage == "moved" else "small.yaml")
        self.folder.mkdir(parents=True, exist_ok=True)
        file.write_text(cluster_file(found))
        return sites.site(found, str(file))

    def up(self, stage: Stage) -> Facts:
        """Bring the cluster up in the form that a stage needs, as `make up` does."""
        site = self.site(stage)
        if self._standing is not None and self._standing.cluster != site.cluster:
            self._await_no_machines()
        status = site.up()
        self._standing = site
        return {"head's epoch": int(status["head"]["epoch"]), "pools": len(status["pools"])}

    def _await_no_machines(self) -> None:
        """Wait until the last job's machines are gone: their network and placement cannot change before that."""
        deadline = time.monotonic() + END
        while left := [node["name"] for node in control.ask(self.access, "status")["nodes"] if node["pool"] != HEAD]:
            if time.monotonic() > deadline:
                minutes = f"{END / 60:.0f} min after the last job"
                raise SpotrunError(f"these machines are still there {minutes}: {', '.join(left)}")
            time.sleep(_AGAIN)

    def down(self) -> Facts:
        """Take the cluster down, as `make down FORCE=1` does."""
        return {"said": sites.site(self.cluster, self.file).down(everything=False)}

    def is_up(self) -> bool:
        """Whether a head has come up."""
        try:
            sites.site(self.cluster, self.file).access()
        except SpotrunError:
            return False  # credentials or the bucket may also be missing: a step reports that
        return True

    @property
    def access(self) -> Access:
        """How to reach the cluster in its present form."""
        return (self._standing or self.site("head")).access()

    def trace(self, name: str) -> Trace:
        """The results of a job. The job runs once. If it failed, each step that reads the results gets its error."""
        if name not in self._seen:
            try:
                self._seen[name] = self._run(name)
            except SpotrunError as error:
                self._seen[name] = error
        found = self._seen[name]
        if isinstance(found, SpotrunError):
            raise found
        return found

    def _run(self, name: str) -> Trace:
        access, planned = self.access, self._plans[name]
        job = self._submitted.get(name) or self._submit(name, access)
        # Queue the next job early: if no job waits, the head gives the machines back, and they must boot again.
        if following := self._next(name):
            self._submit(following, access)
        limit = sum(step.limit for step in STEPS if step.job == name)
        return trace.follow(access, planned, job, limit)

    def _next(self, name: str) -> str:
        """The job after this one on the same machines; empty if there is none."""
        able = [step for step in self._wanted if step.job and not plan.missing(step, self.cluster)]
        # Two small machines are cheap, so ask for them early. Ask for two with GPUs only after a job on one of them.
        groups = {step.job: step.stage.replace("machines", "machine") for step in able}
        names = [each for each in groups if groups[each] == groups.get(name)]
        later = names[names.index(name) + 1 :] if name in names else []
        return next((each for each in later if each not in self._submitted), "")

    def _submit(self, name: str, access: Access) -> str:
        spec = (self._standing or self.site("head")).cluster
        folder = self.folder / "jobs" / name.replace(" ", "-")
        file = stage_job(folder, name, self._plans[name], plan.steady(self.cluster))
        self._submitted[name] = jobs.submit(access, spec, str(file), lambda _: None)
        return self._submitted[name]


def cluster_file(cluster: ClusterSpec) -> str:
    """A cluster file that describes this cluster. JSON is YAML too."""
    return json.dumps(cluster.model_dump(mode="json", exclude_none=True), indent=1) + "\n"


def stage_job(folder: Path, name: str, planned: Plan, steady: Sequence[str] = ()) -> Path:
    """Copy a job's folder to `folder`, and write a job file there. Returns the path of this file."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(planned.folder, folder, ignore=_IGNORED)
    if planned.script == "tests.py":
        _add_tests(folder)
    file = folder / "job.yaml"
    file.write_text(json.dumps(planned.job_file(name, steady)) + "\n")
    return file


def _add_tests(folder: Path) -> None:
    """The tests for CUDA, and what they import."""
    root = Path(__file__).parents[2]
    shutil.copy(root / "pyproject.toml", folder)
    shutil.copytree(root / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__", "image", "e2e"))
