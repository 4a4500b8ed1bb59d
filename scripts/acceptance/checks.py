"""What does each step, by its name: functions that try the real thing, with the functions behind the `make` targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from scripts import cluster as clusters
from scripts import preflight, stacks
from scripts.acceptance import accounts, devices, trace, ways
from scripts.acceptance.record import Facts, Failed, NotRun
from scripts.acceptance.site import Site
from scripts.acceptance.steps import Step
from scripts.home import home
from spotrun import cloud
from spotrun.errors import SpotrunError

Check = Callable[[Site, Step], Facts]


def checks(site: Site) -> dict[str, Callable[[Step], Facts]]:
    """Every step's function, for this cluster."""
    return {name: partial(check, site) for name, check in CHECKS.items()}


def _tools(site: Site, _: Step) -> Facts:
    preflight.check_tools(site.cluster)
    return {"terraform": stacks.terraform()}


def _login(site: Site, _: Step) -> Facts:
    return {"account": cloud.account(site.cluster)}


def _offers(site: Site, _: Step) -> Facts:
    preflight.check_offers(site.cluster, site.file)
    return {"zones": len({pool.zone for pool in site.cluster.pools})}


def _quotas(site: Site, _: Step) -> Facts:
    preflight.check_quotas(site.cluster)
    return {"pools": len(site.cluster.pools)}


def _image(site: Site, _: Step) -> Facts:
    made = stacks.synthesize(site.cluster, site.file, home())
    preflight.check_images(site.cluster, made.document("pools"), site.file)
    return {}


def _plan(site: Site, _: Step) -> Facts:
    return {"changes": "some" if clusters.plan(*site.spec("head")) else "none"}


def _up(site: Site, step: Step) -> Facts:
    return site.up(step.stage)


def _ways_in(site: Site, _: Step) -> Facts:
    return ways.into_head(site.access)


def _host_keys(site: Site, _: Step) -> Facts:
    return ways.refuses_another_key(site.access)


def _join(site: Site, step: Step) -> Facts:
    return trace.boot(site.trace(step.job))


def _gate(site: Site, step: Step) -> Facts:
    """The lines of the health gate on the machine of a job, as its probe has printed them."""
    said = site.trace(step.job).all("fitness")
    if not said:
        raise SpotrunError("the probe of the health gate printed nothing")
    shown = ("machine", "gpus", "torch_gpus", "efas", "disk", "clock")
    facts: Facts = {key: said[0][key] for key in shown if said[0].get(key) is not None}
    facts["remarks"] = "; ".join(text for line in said for text in line["remarks"]) or "none"
    if problems := [f"{line['node']}: {text}" for line in said for text in line["problems"]]:
        raise Failed("; ".join(problems), facts)
    return facts


def _node_ssh(site: Site, step: Step) -> Facts:
    found = site.trace(step.job)
    if found.ways is None:
        raise SpotrunError(found.ways_error or "the job ended before the ways into its node could be tried")
    return found.ways


def _interruption(kind: str, site: Site, step: Step) -> Facts:
    """One interruption of a job's: its pause by part. With notice, no step may be lost."""
    found = site.trace(step.job)
    facts = trace.pause(found.loss(kind))
    if kind == "preempt" and facts["steps lost"]:
        raise Failed(f"{facts['steps lost']} steps were lost although there was a notice", facts)
    return facts


def _notice(site: Site, step: Step) -> Facts:
    facts = _interruption("preempt", site, step)
    marks = site.trace(step.job).marks
    if "notice seen" in marks:
        facts["notice seen after s"] = round(marks["notice seen"] - marks["preempt asked for"], 2)
    return facts


def _replacement(site: Site, step: Step) -> Facts:
    """A machine that alone had the job is gone, and the job ended well: another has had it."""
    found = site.trace(step.job)
    if not found.taken:
        raise SpotrunError("no machine was taken from the job")
    generations = int(found.last["generation"])
    if generations < 2:
        raise SpotrunError("the job went on in the same generation: its machine was not replaced")
    return {"generations": generations, "machines seen": len(found.nodes), "taken": found.taken[0][1]}


def _reference(site: Site, step: Step) -> Facts:
    found = site.trace(step.job)
    if interruptions := [loss["kind"] for loss in found.last["interruptions"]]:
        raise NotRun(f"the run was disturbed ({', '.join(interruptions)}): a reference needs one without interruptions")
    return {"digest": found.said("train")["digest"], **_rate(found)}


def _equality(reference: str, site: Site, step: Step) -> Facts:
    """The digests of both runs. They hold only where each sum has two addends: then its order does not matter."""
    undisturbed, disturbed = (site.trace(name).said("train") for name in (reference, step.job))
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


def _down(site: Site, _: Step) -> Facts:
    return site.down()


def _left(site: Site, _: Step) -> Facts:
    return accounts.left(site.cluster, site.file)


CHECKS: Mapping[str, Check] = {
    "tools": _tools,
    "login": _login,
    "permissions": lambda site, _: accounts.permissions(site.cluster),
    "offers": _offers,
    "quotas": _quotas,
    "image": _image,
    "plan": _plan,
    "up": _up,
    "ways in": _ways_in,
    "host keys": _host_keys,
    "grants": lambda site, _: accounts.grants(site.access),
    "guest agent": lambda site, _: accounts.guest_agent(site.access),
    "instance connect": lambda site, _: accounts.instance_connect(site.access),
    "join": _join,
    "gate": _gate,
    "node ssh": _node_ssh,
    "notice": _notice,
    "replacement": _replacement,
    "notice order": lambda site, step: accounts.notice_order(site.trace(step.job)),
    "shutdown budget": partial(_interruption, "preempt"),
    "disk encryption": lambda site, _: accounts.disk_encryption(site.cluster),
    "reference": _reference,
    "preempt": partial(_interruption, "preempt"),
    "kill": partial(_interruption, "kill"),
    "equality": partial(_equality, "reference"),
    "gpu up": _up,
    "gpu gate": _gate,
    "matrix product": lambda site, step: devices.matrix(site.trace(step.job)),
    "snapshot copy": lambda site, step: devices.copy(site.trace(step.job)),
    "fork server": lambda site, step: devices.fork(site.trace(step.job)),
    "gpu tests": lambda site, step: devices.tests(site.trace(step.job)),
    "efa layout": lambda site, step: devices.efa(site.trace(step.job)),
    "all-reduce": lambda site, step: devices.all_reduce(site.trace(step.job), site.cluster),
    "vit": lambda site, step: devices.vit(site.access, site.trace(step.job)),
    "gpu reference": _reference,
    "gpu preempt": partial(_interruption, "preempt"),
    "gpu kill": partial(_interruption, "kill"),
    "state transfer": lambda site, step: devices.transfer(site.trace(step.job)),
    "gpu equality": partial(_equality, "gpu reference"),
    "moved up": _up,
    "placement": lambda site, step: devices.placement(site.facts_of("all-reduce"), site.trace(step.job), site.cluster),
    "down": _down,
    "left": _left,
}
