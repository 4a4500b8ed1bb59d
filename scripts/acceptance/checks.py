"""What does each step, by its name: functions that try the real thing, with the functions behind the `make` targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from scripts import preflight, stacks
from scripts.acceptance import accounts, devices, trace, ways
from scripts.acceptance.record import Facts, Failed, NotRun
from scripts.acceptance.rig import Rig
from scripts.acceptance.steps import Step
from scripts.home import home
from scripts.ssh import Access
from spotrun import cloud
from spotrun.errors import SpotrunError

Check = Callable[[Rig, Step], Facts]


def checks(rig: Rig) -> dict[str, Callable[[Step], Facts]]:
    """Every step's function, for this cluster."""
    return {name: partial(check, rig) for name, check in CHECKS.items()}


def _tools(rig: Rig, _: Step) -> Facts:
    preflight.check_tools(rig.cluster)
    return {"terraform": stacks.terraform()}


def _login(rig: Rig, _: Step) -> Facts:
    return {"account": cloud.account(rig.cluster)}


def _offers(rig: Rig, _: Step) -> Facts:
    preflight.check_offers(rig.cluster, rig.file)
    return {"zones": len({pool.zone for pool in rig.cluster.pools})}


def _quotas(rig: Rig, _: Step) -> Facts:
    with cloud.asking(rig.cluster) as ask:
        preflight.check_quotas(rig.cluster, ask)
    return {"pools": len(rig.cluster.pools)}


def _image(rig: Rig, _: Step) -> Facts:
    made = stacks.synthesize(rig.cluster, rig.file, home())
    preflight.check_images(rig.cluster, made.document("pools"), rig.file)
    return {}


def _plan(rig: Rig, _: Step) -> Facts:
    return {"changes": "some" if rig.site("head").plan() else "none"}


def _up(rig: Rig, step: Step) -> Facts:
    return rig.up(step.stage)


def _ways_in(rig: Rig, _: Step) -> Facts:
    return ways.into_head(rig.access)


def _host_keys(rig: Rig, _: Step) -> Facts:
    return ways.refuses_another_key(rig.access)


def _join(rig: Rig, step: Step) -> Facts:
    return trace.boot(rig.trace(step.job))


def _gate(rig: Rig, step: Step) -> Facts:
    """The lines of the health gate on the machine of a job, as its probe has printed them."""
    said = rig.trace(step.job).all("fitness")
    if not said:
        raise SpotrunError("the probe of the health gate printed nothing")
    shown = ("machine", "gpus", "torch_gpus", "efas", "disk", "clock")
    facts: Facts = {key: said[0][key] for key in shown if said[0].get(key) is not None}
    facts["remarks"] = "; ".join(text for line in said for text in line["remarks"]) or "none"
    if problems := [f"{line['node']}: {text}" for line in said for text in line["problems"]]:
        raise Failed("; ".join(problems), facts)
    return facts


def _node_ssh(rig: Rig, step: Step) -> Facts:
    found = rig.trace(step.job)
    if found.ways is None:
        raise SpotrunError(found.ways_error or "the job ended before the ways into its node could be tried")
    return found.ways


def _interruption(kind: str, rig: Rig, step: Step) -> Facts:
    """One interruption of a job's: its pause by part. With notice, no step may be lost."""
    found = rig.trace(step.job)
    facts = trace.pause(found.loss(kind))
    if kind == "preempt" and facts["steps lost"]:
        raise Failed(f"{facts['steps lost']} steps were lost although there was a notice", facts)
    return facts


def _notice(rig: Rig, step: Step) -> Facts:
    facts = _interruption("preempt", rig, step)
    marks = rig.trace(step.job).marks
    if "notice seen" in marks:
        facts["notice seen after s"] = round(marks["notice seen"] - marks["preempt asked for"], 2)
    return facts


def _replacement(rig: Rig, step: Step) -> Facts:
    """A machine that alone had the job is gone, and the job ended well: another has had it."""
    found = rig.trace(step.job)
    if not found.taken:
        raise SpotrunError("no machine was taken from the job")
    generations = int(found.last["generation"])
    if generations < 2:
        raise SpotrunError("the job went on in the same generation: its machine was not replaced")
    return {"generations": generations, "machines seen": len(found.nodes), "taken": found.taken[0][1]}


def _reference(rig: Rig, step: Step) -> Facts:
    found = rig.trace(step.job)
    if interruptions := [loss["kind"] for loss in found.last["interruptions"]]:
        raise NotRun(f"the run was disturbed ({', '.join(interruptions)}): a reference needs one without interruptions")
    return {"digest": found.said("train")["digest"], **_rate(found)}


def _equality(reference: str, rig: Rig, step: Step) -> Facts:
    """The digests of both runs. They hold only where each sum has two addends: then its order does not matter."""
    undisturbed, disturbed = (rig.trace(name).said("train") for name in (reference, step.job))
    facts: Facts = {"undisturbed": undisturbed["digest"], "disturbed": disturbed["digest"]}
    facts["workers"] = int(disturbed["world"])
    if undisturbed["digest"] == disturbed["digest"]:
        return facts
    if disturbed["world"] != 2:
        raise NotRun(f"the digests differ, as sums over {disturbed['world']} workers may: their order can change")
    raise Failed("the disturbed run ended with other bits than the undisturbed one", facts)


def _rate(found: trace.Trace) -> Facts:
    started, ended = found.last["started"], found.last["ended"]
    return {"seconds": round(ended - started, 2)} if started and ended else {}


def _down(rig: Rig, _: Step) -> Facts:
    return rig.down()


def _left(rig: Rig, _: Step) -> Facts:
    return accounts.left(rig.cluster, rig.file)


def _judge(judge: Callable[[trace.Trace], Facts]) -> Check:
    """A check that only reads what came of the step's job."""
    return lambda rig, step: judge(rig.trace(step.job))


def _on_head(ask: Callable[[Access], Facts]) -> Check:
    return lambda rig, _: ask(rig.access)


CHECKS: Mapping[str, Check] = {
    "tools": _tools,
    "login": _login,
    "permissions": lambda rig, _: accounts.permissions(rig.cluster),
    "offers": _offers,
    "quotas": _quotas,
    "image": _image,
    "plan": _plan,
    "up": _up,
    "ways in": _ways_in,
    "host keys": _host_keys,
    "grants": _on_head(accounts.grants),
    "guest agent": _on_head(accounts.guest_agent),
    "instance connect": _on_head(accounts.instance_connect),
    "join": _join,
    "gate": _gate,
    "node ssh": _node_ssh,
    "notice": _notice,
    "replacement": _replacement,
    "notice order": _judge(accounts.notice_order),
    "shutdown budget": partial(_interruption, "preempt"),
    "disk encryption": lambda rig, _: accounts.disk_encryption(rig.cluster),
    "reference": _reference,
    "preempt": partial(_interruption, "preempt"),
    "kill": partial(_interruption, "kill"),
    "equality": partial(_equality, "reference"),
    "gpu up": _up,
    "gpu gate": _gate,
    "matrix product": _judge(devices.matrix),
    "snapshot copy": _judge(devices.copy),
    "fork server": _judge(devices.fork),
    "gpu tests": _judge(devices.tests),
    "efa layout": _judge(devices.efa),
    "all-reduce": lambda rig, step: devices.all_reduce(rig.trace(step.job), rig.cluster),
    "vit": lambda rig, step: devices.vit(rig.access, rig.trace(step.job)),
    "gpu reference": _reference,
    "gpu preempt": partial(_interruption, "preempt"),
    "gpu kill": partial(_interruption, "kill"),
    "state transfer": _judge(devices.transfer),
    "nccl segments": _judge(devices.segments),
    "gpu equality": partial(_equality, "gpu reference"),
    "maintenance notice": _judge(accounts.maintenance_notice),
    "moved up": _up,
    "placement": lambda rig, step: devices.placement(rig.facts_of("all-reduce"), rig.trace(step.job), rig.cluster),
    "down": _down,
    "left": _left,
}
