"""Steps about an account: what you may do in it, which requests of its machines were refused, what is left in it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Sequence, Set
from types import ModuleType
from typing import Any

from scripts.acceptance import ways
from scripts.acceptance.record import Facts, Failed, NotRun
from scripts.acceptance.trace import Trace
from scripts.home import home
from scripts.site import site
from scripts.ssh import HEAD, Access, read_host
from spotrun import cloud
from spotrun.cloud import Left
from spotrun.errors import SpotrunError
from spotrun.spec import ClusterSpec

# Dollars for a GB and a month of the bucket: docs/gcp.md and docs/aws.md.
_BUCKET = {"gcp": 0.020, "aws": 0.023}
# The head's event about a notice long before the machine is taken.
_COMING = r"will be taken at .* UTC: maintenance"
_REFUSED = r"\b403\b|Forbidden|AccessDenied|UnauthorizedOperation|PERMISSION_DENIED|may not do"


def permissions(cluster: ClusterSpec) -> Facts:
    """Ask the cloud which of the calls that stacks and tasks make you may make. Creates nothing."""
    allowed, refused = _audit(cluster).permissions(cluster)
    facts: Facts = {"allowed": len(allowed), "refused": ", ".join(refused) or "none"}
    if refused:
        raise Failed(f"you may not: {', '.join(refused)}", facts)
    return facts


def grants(access: Access) -> Facts:
    """The head's requests that the cloud refused since the head started. The head retries them, so it is up now."""
    said = ways.say(access, HEAD, "journalctl --unit spotrun-head --no-pager --output cat")
    refused = [line for line in said.splitlines() if re.search(_REFUSED, line)]
    return {"refused at first": len(refused), "the last one": refused[-1][:200] if refused else "none"}


def guest_agent(access: Access) -> Facts:
    """Whether the head has the one host key that it has published, and no other."""
    command = "ls /etc/ssh/ssh_host_*_key.pub; cat /etc/ssh/ssh_host_ed25519_key.pub"
    *files, key = [line for line in ways.say(access, HEAD, command).splitlines() if line.strip()]
    facts: Facts = {"host keys": len(files)}
    published = {tuple(line.split()[:2]) for line in read_host(access, HEAD).keys}
    if tuple(key.split()[:2]) not in published:
        raise Failed("the head's host key is not the one that it has published", facts)
    if len(files) > 1:
        raise Failed(f"the head has {len(files)} host keys; its image makes one: {', '.join(files)}", facts)
    return facts


def instance_connect(access: Access) -> Facts:
    """How often sshd complained about the program that looks up pushed keys. It works now: this login needed it."""
    command = "journalctl --unit ssh --no-pager --output cat | grep -c AuthorizedKeysCommand || true"
    said = ways.say(access, HEAD, command)
    return {"complaints of sshd": int(said.strip() or 0)}


def notice_order(found: Trace) -> Facts:
    """The notices that a preempted machine saw in Google's metadata, in order, with the seconds since the first."""
    seen = _notices(found)
    if not seen:
        raise SpotrunError("neither preempted nor maintenance-event changed before the machine ended")
    first = float(seen[0]["at"])
    order = ", ".join(f"{line['key']}={line['value']} after {float(line['at']) - first:.1f} s" for line in seen)
    if not any(line["key"] == "preempted" and line["value"] == "TRUE" for line in seen):
        raise Failed("simulateMaintenanceEvent did not set `preempted`", {"order": order})
    return {"order": order}


def maintenance_notice(found: Trace) -> Facts:
    """Whether a machine trained on after an early notice of maintenance, which its agent reports as an event."""
    told = [text for text in found.events if re.search(_COMING, text)]
    seen = [line for line in _notices(found) if line["key"] == "maintenance-event"]
    facts: Facts = {"metadata": ", ".join(str(line["value"]) for line in seen) or "no change"}
    facts |= {"event": told[0] if told else "none", "steps": int(found.last["step"])}
    if interruptions := [each["kind"] for each in found.last["interruptions"]]:
        raise Failed(f"the machine did not train on: {', '.join(interruptions)}", facts)
    if not seen:
        raise NotRun("simulateMaintenanceEvent gave this machine no notice of maintenance while the job ran")
    if not told:
        raise Failed("the metadata server announced maintenance, and the agent did not report it", facts)
    return facts


def flex_template(cluster: ClusterSpec) -> Facts:
    """Whether Google has the templates of flex pools as Flex-start ones. Others would cost the full price."""
    pools = {pool.name for pool in cluster.pools if pool.market == "flex"}
    return judge_models(pools, _audit(cluster).models(cluster))


def judge_models(pools: Set[str], models: Iterable[tuple[str, str]]) -> Facts:
    """The provisioning models of flex pools. models: of all templates, each with its pool. Pure."""
    found = [each for each in models if each[0] in pools]
    facts: Facts = {f"pool {pool}": model or "no provisioning model" for pool, model in found}
    if lacking := sorted(pools - {pool for pool, _ in found}):
        raise Failed(f"Google lists no template of pools {', '.join(lacking)}", facts)
    if wrong := [f"pool {pool} is {model or 'without a model'}" for pool, model in found if model != "FLEX_START"]:
        raise Failed(f"the template is not FLEX_START, so machines cost the full price: {', '.join(wrong)}", facts)
    return facts


def disk_encryption(cluster: ClusterSpec) -> Facts:
    """The keys that encrypt the machines' disks. Machines have joined, so they may use these keys."""
    keys: list[str] = _audit(cluster).disk_keys(cluster)
    if not keys:
        raise NotRun("this account has no default KMS key for EBS, so its disks are not encrypted with one")
    return {"keys": ", ".join(keys)}


def left(cluster: ClusterSpec, file: str) -> Facts:
    """What still has the cluster's label after `down`. Anything that costs by the hour is unexpected."""
    if cluster.cloud == "local":
        from spotrun.cloud.local import cloud

        if cloud.alive(cluster.name, home()):
            raise SpotrunError(f"processes of cluster {cluster.name} still run")
        return {"processes": 0}
    bucket = f"${_BUCKET[cluster.cloud]} a GB and month"
    return judge(_audit(cluster).left(cluster), {site(cluster, file).bucket().url: bucket})


def judge(found: Sequence[Left], facts: Facts) -> Facts:
    """The list with prices. Raises `Failed` if the list has something that `down` should have removed. Pure."""
    facts = facts | {f"{each.kind} {each.name}": _price(each) for each in found}
    if wrong := [f"{each.kind} {each.name} ({_price(each)})" for each in found if not each.stays]:
        raise Failed(f"still there: {', '.join(wrong)}", facts)
    return facts


def _notices(found: Trace) -> list[dict[str, Any]]:
    """The changes on Google's metadata server that the probe has printed."""
    return [line for line in found.lines if line["probe"] == "notice"]


def _price(each: Left) -> str:
    if each.hourly is None:
        return "price not known"
    return f"${each.hourly:.4f} an hour" if each.hourly else "free"


def _audit(cluster: ClusterSpec) -> ModuleType:
    """The module `audit` of the cluster's cloud. Raises `CloudError` without its SDK or credentials."""
    cloud.account(cluster)
    return importlib.import_module(f"spotrun.cloud.{cluster.cloud}.audit")
