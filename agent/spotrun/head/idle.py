"""A job that waits with some machines, but fewer than it needs: they cost, and do nothing. Pure.

They are held for `hold_idle`, as more may come. Then they are given back, once the state that they hold is in the
bucket, and the pools are empty. The cloud is asked for all of them again from time to time, ever more rarely, for a
short time each. When it has enough of them the job goes on. All of it is in the job's state: a new head goes on.
"""

from __future__ import annotations

from spotrun.head import absent, health, repair, stake
from spotrun.head.health import View
from spotrun.head.state import Idle, JobState, Rest
from spotrun.spec import JobSpec

PROBE = 120.0  # seconds for which the cloud is asked for machines each time
AGAIN = 60.0  # seconds until it is asked again; doubled each time …
AGAIN_MOST = 1800.0  # … up to this


def observe(job: JobState, view: View) -> JobState:
    """The job with since when it has had fewer machines than it needs."""
    if job.current is not None or job.ending is not None or job.stopping:
        return job.model_copy(update={"idle": None}) if job.idle else job
    if not view.listed:
        return job  # what there is nobody knows
    found = usable(view)
    if len(found) >= JobSpec.kept(job.spec).nodes.min:
        return job.model_copy(update={"idle": None}) if job.idle else job
    if job.idle is None and found:  # a pool that has none goes on asking, at no cost
        return job.model_copy(update={"idle": Idle(since=view.now)})
    return job


def decide(view: View, spec: JobSpec) -> tuple[Rest, ...]:
    """Give the machines back, ask again, or neither."""
    idle, now = view.job.idle, view.now
    if idle is None or not view.listed:
        return ()
    found, least = len(usable(view)), spec.nodes.min
    if not idle.next:
        if now - idle.since < spec.hold_idle or not _saved(view, spec, idle):
            return ()
        why = f"{found} of the {least} machines that it needs, for {_minutes(now - idle.since)}: they are given back"
        return (_later(idle, now, why),)
    if not idle.until:
        if now < idle.next:
            return ()
        began = idle.model_copy(update={"tries": idle.tries + 1, "until": now + PROBE})
        return (Rest(began, f"asking the cloud for machines again, for {_minutes(PROBE)} (try {began.tries})"),)
    if now < idle.until or not _saved(view, spec, idle):
        return ()
    return (_later(idle, now, f"still {found} of {least} machines: given back"),)


def resting(job: JobState | None) -> bool:
    """Whether the job's machines are given back, and none is asked for now."""
    return job is not None and job.current is None and job.idle is not None and job.idle.next > 0 and not job.idle.until


def condition(view: View) -> dict[str, object] | None:
    """What operators read: since when, and one line."""
    idle = view.job.idle
    if idle is None or view.job.current is not None:
        return None
    spec = JobSpec.kept(view.job.spec)
    found = f"{len(usable(view))} of {spec.nodes.min} machines"
    if resting(view.job):
        text = f"waiting, machines given back; next try in {_minutes(idle.next - view.now)}"
    elif idle.until:
        text = f"waiting, asking the cloud again: {found}, for {_minutes(idle.until - view.now)} more"
    else:
        text = f"waiting with {found}; they are given back in {_minutes(idle.since + spec.hold_idle - view.now)}"
    return {"since": idle.since, "text": text}


def usable(view: View) -> set[str]:
    """Machines that are there for the job, or on their way."""
    bad = repair.useless(view)
    listed = {each.name for each in view.machines if each.state in ("provisioning", "running")}
    linked = {node.name for node in view.nodes if node.linked and node.cloud not in health.GONE}
    return (listed | linked).difference(bad)


def _saved(view: View, spec: JobSpec, idle: Idle) -> bool:
    """Whether no machine holds a state that is not in the bucket; silent ones are waited for as long as it is worth."""
    holders = stake.unsaved(view)
    if view.blind() or any(node.linked and not health.silent(view, node, spec) for node in holders):
        return False
    away = holders or any(absent.served(view, each) for each in view.machines)
    return not away or view.now - idle.since > stake.patience(view.job, absent.HOLDER)


def _later(idle: Idle, now: float, why: str) -> Rest:
    pause = min(AGAIN_MOST, AGAIN * 2**idle.tries)
    return Rest(idle.model_copy(update={"next": now + pause, "until": 0.0}), f"{why}; next try in {_minutes(pause)}")


def _minutes(seconds: float) -> str:
    """90 s, 5 min"""
    whole = max(0, round(seconds))
    return f"{whole} s" if whole < 120 else f"{round(whole / 60)} min"
