"""A job that waits with some machines, but fewer than it needs. These machines cost money and do nothing. Pure.

The job keeps the machines for `hold_idle`, as more may come. Then the head gives them back, once their state is in the
bucket. With growing pauses, the head asks the cloud for all machines again, for a short time each. The job continues
when the cloud has enough machines. The job's state has all of this, so a new head continues the same wait.

While a job rests, no policy chooses machines for it. So a job with a deadline rests at most until its policy must
choose again, and not at all if that is soon.
"""

from __future__ import annotations

from spotrun.head.job_state import Idle, JobState, SetIdle
from spotrun.head.planner import patience
from spotrun.head.planner.liveness import had_joined, reports
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import ENDING_STATES, View


def observe(job: JobState, view: View) -> JobState:
    """The job, with the time since when it has had fewer machines than it needs."""
    waits = job.current is None and (job.wants_nodes or job.resting)
    if waits and not view.listed:
        return job  # the cloud does not answer: the number of machines is not known
    found = usable(view) if waits else set()
    if not waits or len(found) >= job.spec.nodes.min:
        return job.replace(idle=None)
    # A job without any machine keeps asking: that costs nothing.
    return job.replace(idle=Idle(since=view.now)) if job.idle is None and found else job


def decide(view: View) -> tuple[SetIdle, ...]:
    """Give the machines back, ask again, or neither."""
    idle, now = view.job.idle, view.now
    if idle is None or not view.listed:
        return ()
    found, least = len(usable(view)), view.job.spec.nodes.min
    if not idle.next:
        if now - idle.since < view.job.spec.hold_idle or not _may_rest(view) or not _saved(view, idle):
            return ()
        why = f"{found} of the {least} machines that it needs, for {duration(now - idle.since)}: they are given back"
        return (_later(view, idle, why),)
    if not idle.until:
        if now < idle.next:
            return ()
        began = idle.replace(tries=idle.tries + 1, until=now + TIMEOUTS.probe)
        why = f"asking the cloud for machines again, for {duration(TIMEOUTS.probe)} (try {began.tries})"
        return (SetIdle(began, why),)
    if now < idle.until or not _may_rest(view) or not _saved(view, idle):
        return ()
    return (_later(view, idle, f"still {found} of {least} machines: given back"),)


def condition(view: View) -> dict[str, object] | None:
    """For operators: since when the job waits, and one line of text."""
    idle = view.job.idle
    if idle is None or view.job.current is not None:
        return None
    found = f"{len(usable(view))} of {view.job.spec.nodes.min} machines"
    if view.job.resting:
        text = f"waiting, machines given back; next try in {duration(idle.next - view.now)}"
    elif idle.until:
        text = f"waiting, asking the cloud again: {found}, for {duration(idle.until - view.now)} more"
    else:
        left = idle.since + view.job.spec.hold_idle - view.now
        text = f"waiting with {found}; they are given back in {duration(left)}"
    return {"since": idle.since, "text": text}


def usable(view: View) -> set[str]:
    """Machines that are there for the job, or are booting for it."""
    listed = {
        name
        for name, each in view.conditions.items()
        if each.machine.state in ("provisioning", "running") and not each.unusable
    }
    bad = {name for name, each in view.conditions.items() if each.unusable}
    assigned = (node for node in view.nodes if node.assigned and node.connected and node.cloud not in ENDING_STATES)
    return listed | {node.name for node in assigned}.difference(bad)


def duration(seconds: float) -> str:
    """Such as 90 s or 5 min."""
    whole = max(0, round(seconds))
    return f"{whole} s" if whole < 120 else f"{round(whole / 60)} min"


def _saved(view: View, idle: Idle) -> bool:
    """Whether every state is in the bucket.

    The wait for the state of a machine that is silent, or that cannot upload it, is as long as that state is worth.
    """
    holders = patience.unsaved(view)
    hopeful = (node for node in holders if not patience.hopeless(view, view.job, node.work))
    if view.blind() or any(reports(view, node) for node in hopeful):
        return False
    away = holders or any(had_joined(view, each) for each in view.machines)
    return not away or view.now - idle.since > patience.patience(view.job, TIMEOUTS.last_holder)


def _may_rest(view: View) -> bool:
    """Whether the shortest pause ends before the job's policy must choose again."""
    return view.rest_until is None or view.rest_until - view.now >= TIMEOUTS.probe_pause


def _later(view: View, idle: Idle, why: str) -> SetIdle:
    pause = min(TIMEOUTS.probe_pause_most, TIMEOUTS.probe_pause * 2**idle.tries)
    if view.rest_until is not None:
        pause = min(pause, view.rest_until - view.now)
    return SetIdle(idle.replace(next=view.now + pause, until=0.0), f"{why}; next try in {duration(pause)}")
