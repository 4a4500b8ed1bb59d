"""The function of each step, by the step's name. These functions call what the `make` targets call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from scripts import preflight, stacks
from scripts.acceptance import accounts, devices, plan, trace, ways
from scripts.acceptance.record import Facts, Failed, NotRun
from scripts.acceptance.rig import Rig
from scripts.acceptance.steps import Step
from scripts.acceptance.trace import Trace
from scripts.home import home
from scripts.ssh import Access
from spotrun import cloud
from spotrun.errors import QuotaError, SpotrunError

Check = Callable[[Rig, Step], Facts]


def _tools(rig: Rig, _: Step) -> Facts:
    preflight.check_tools(rig.cluster)
    return {"terraform": stacks.terraform()}


def _offers(rig: Rig, _: Step) -> Facts:
    preflight.check_offers(rig.cluster, rig.file)
    return {"zones": len({pool.zone for pool in rig.cluster.pools})}


def _quotas(rig: Rig, _: Step) -> Facts:
    """Of the cluster's own machines, and of the small ones: AWS counts these by other quotas."""
    small, lacks = plan.small(rig.cluster), list[str]()
    for cluster in (rig.cluster, *(each for each in (small,) if each is not rig.cluster)):
        try:
            with cloud.asking(cluster) as ask:
                preflight.check_quotas(cluster, ask, needs_all=cluster is not rig.cluster)
        except QuotaError as error:
            whose = " (of the first steps' small machines)" if cluster is not rig.cluster else ""
            lacks += [line + whose for line in str(error).splitlines()]
    preflight.check_disk_key(rig.cluster)
    if lacks:
        raise QuotaError("\n".join(lacks))
    return {"pools": len(rig.cluster.pools)}


def _image(rig: Rig, _: Step) -> Facts:
    made = stacks.synthesize(rig.cluster, rig.file, home())
    preflight.check_images(rig.cluster, made.document("pools"), rig.file)
    return {}


def _up(rig: Rig, step: Step) -> Facts:
    return rig.up(step.stage)


def _gate(found: Trace) -> Facts:
    """What the health gate says of a job's machine, as the job's probe has printed it."""
    said = found.all("fitness")
    shown = ("machine", "gpus", "torch_gpus", "efas", "disk", "clock")
    facts: Facts = {key: said[0][key] for key in shown if said[0].get(key) is not None}
    facts["remarks"] = "; ".join(text for line in said for text in line["remarks"]) or "none"
    if problems := [f"{line['node']}: {text}" for line in said for text in line["problems"]]:
        raise Failed("; ".join(problems), facts)
    return facts


def _node_ssh(found: Trace) -> Facts:
    if found.ways is None:
        raise SpotrunError(found.ways_error or "the job ended before SSH to its node could be tried")
    return found.ways


def _preempt(found: Trace) -> Facts:
    """The pause of an interruption with notice, by part. No step may be lost."""
    facts = trace.pause(found.interruption("preempt"))
    if facts["steps lost"]:
        raise Failed(f"{facts['steps lost']} steps were lost although there was a notice", facts)
    return facts


def _kill(found: Trace) -> Facts:
    return trace.pause(found.interruption("kill"))


def _notice(found: Trace) -> Facts:
    facts, marks = _preempt(found), found.marks
    if "notice seen" in marks:
        facts["notice seen after s"] = round(marks["notice seen"] - marks["preempt asked for"], 2)
    return facts


def _replacement(found: Trace) -> Facts:
    """The job's only machine was taken, and the job succeeded. So another machine has replaced it."""
    if not found.taken:
        raise SpotrunError("no machine was taken from the job")
    generations = int(found.last["generation"])
    if generations < 2:
        raise SpotrunError("the job went on in the same generation: its machine was not replaced")
    return {"generations": generations, "machines seen": len(found.nodes), "taken": found.taken[0][1]}


def _reference(found: Trace) -> Facts:
    if interruptions := [each["kind"] for each in found.last["interruptions"]]:
        raise NotRun(f"the run was disturbed ({', '.join(interruptions)}): a reference needs one without interruptions")
    started, ended = found.last["started"], found.last["ended"]
    facts: Facts = {"digest": found.said("train")["digest"]}
    return facts | ({"seconds": round(ended - started, 2)} if started and ended else {})


def _equality(reference: str, rig: Rig, step: Step) -> Facts:
    """Compare the digests of both runs. With two workers they must be equal: the order of two addends is irrelevant."""
    undisturbed, disturbed = (rig.trace(name).said("train") for name in (reference, step.job))
    facts: Facts = {"undisturbed": undisturbed["digest"], "disturbed": disturbed["digest"]}
    facts["workers"] = int(disturbed["world"])
    if undisturbed["digest"] == disturbed["digest"]:
        return facts
    if disturbed["world"] != 2:
        raise NotRun(f"the digests differ. With {disturbed['world']} workers they may: the order of sums can change")
    raise Failed("the disturbed run ended with another state than the undisturbed one", facts)


def _of_job(judge: Callable[[Trace], Facts]) -> Check:
    """A check that only reads the results of the step's job."""
    return lambda rig, step: judge(rig.trace(step.job))


def _on_head(ask: Callable[[Access], Facts]) -> Check:
    return lambda rig, _: ask(rig.access)


CHECKS: Mapping[str, Check] = {
    "tools": _tools,
    "login": lambda rig, _: {"account": cloud.account(rig.cluster)},
    "permissions": lambda rig, _: accounts.permissions(rig.cluster),
    "offers": _offers,
    "quotas": _quotas,
    "image": _image,
    "plan": lambda rig, _: {"changes": "some" if rig.site("head").plan() else "none"},
    "up": _up,
    "ways in": _on_head(ways.into_head),
    "host keys": _on_head(ways.refuses_another_key),
    "grants": _on_head(accounts.grants),
    "guest agent": _on_head(accounts.guest_agent),
    "instance connect": _on_head(accounts.instance_connect),
    "join": _of_job(trace.boot),
    "gate": _of_job(_gate),
    "node ssh": _of_job(_node_ssh),
    "notice": _of_job(_notice),
    "replacement": _of_job(_replacement),
    "notice order": _of_job(accounts.notice_order),
    "shutdown budget": _of_job(_preempt),
    "disk encryption": lambda rig, _: accounts.disk_encryption(rig.cluster),
    "reference": _of_job(_reference),
    "preempt": _of_job(_preempt),
    "kill": _of_job(_kill),
    "equality": partial(_equality, "reference"),
    "gpu up": _up,
    "flex template": lambda rig, _: accounts.flex_template(rig.cluster),
    "gpu gate": _of_job(_gate),
    "matrix product": _of_job(devices.matrix),
    "snapshot copy": _of_job(devices.copy),
    "fork server": _of_job(devices.fork),
    "gpu tests": _of_job(devices.tests),
    "efa layout": _of_job(devices.efa),
    "all-reduce": lambda rig, step: devices.all_reduce(rig.trace(step.job), rig.cluster),
    "vit": lambda rig, step: devices.vit(rig.access, rig.trace(step.job)),
    "gpu reference": _of_job(_reference),
    "gpu preempt": _of_job(_preempt),
    "gpu kill": _of_job(_kill),
    "state transfer": _of_job(devices.transfer),
    "nccl segments": _of_job(devices.segments),
    "gpu equality": partial(_equality, "gpu reference"),
    "maintenance notice": _of_job(accounts.maintenance_notice),
    "moved up": _up,
    "placement": lambda rig, step: devices.placement(rig.facts_of("all-reduce"), rig.trace(step.job), rig.cluster),
    "down": lambda rig, _: rig.down(),
    "left": lambda rig, _: accounts.left(rig.cluster, rig.file),
}
