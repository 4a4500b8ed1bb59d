"""What `make advise` compares: the cluster's pools, other machine types of the region, and recorded runs."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from scripts import bundle, console, control, cost, ctrl_c
from scripts.advise import Kind
from scripts.home import home
from scripts.jobs import check
from scripts.make_command import make_command
from scripts.site import Site
from scripts.ssh import Access, Unreachable
from spotrun.cloud import asking, prices
from spotrun.cloud.local import cloud as local
from spotrun.errors import SpotrunError
from spotrun.head.job_state import JobState
from spotrun.head.speeds import Speed
from spotrun.spec import ClusterSpec, JobSpec, PoolSpec, devices_of
from spotrun.spec.machine_types import GPUS_BY_NAME
from spotrun.store import Store

NOW = "now"
Seen = Mapping[str, tuple[float | None, float | None]]
"""By pool: interruptions of one machine in an hour, and the part of the time in which it had all its machines."""
_MEASURE = "-measure"  # the end of such a job's name
_PAUSE = 1.0  # seconds between two looks at the job that measures


def kinds(cluster: ClusterSpec, job: JobSpec, seen: Seen, say: Callable[[str], None]) -> list[Kind]:
    """The cluster's pools, then the other machine types of its region. say: gets a line for what is not known."""
    now = _present(cluster, say)
    found = []
    for pool in cluster.pools:
        devices = devices_of(pool, cluster) or 1
        if (job.pools and pool.name not in job.pools) or devices < (job.devices or 1):
            continue
        table = prices.spot if pool.market == "spot" else prices.on_demand
        attached = (pool.accelerator.type, pool.accelerator.count) if pool.accelerator else ()
        shipped = cluster.cloud != "local" and pool.market != "flex"
        listed = table(cluster.cloud, pool.zone, pool.machine, *attached) if shipped else None
        price, date = (now[pool.name], NOW) if pool.name in now else (listed, prices.DATE if listed else "")
        throughput = _throughput(_gpu(cluster, pool), job.devices or devices)
        what = (pool.name, pool.zone, pool.machine, pool.market, job.devices or devices, pool.max, price, date)
        found.append(Kind(*what, throughput, *seen.get(pool.name, (None, None))))
    return [*found, *_others(cluster, job)]


def history(store: Store, cluster: ClusterSpec) -> Seen:
    """What the head has seen of the pools; empty if its history is not there or not readable."""
    try:
        pools = json.loads(store.find(f"clusters/{cluster.name}/history.json") or b"{}").get("pools", {})
        return {name: _seen(counts) for name, counts in pools.items()}
    except (ValueError, AttributeError, TypeError):
        return {}


def recorded(store: Store, cluster: str, job: JobSpec) -> tuple[list[Speed], float | None]:
    """The speeds of earlier runs of the same job, and the samples of a whole run; None: not known."""
    runs = [each for each in cost.read(store, cluster).jobs if _same(each.spec, job)]
    found: dict[tuple[str, int, int], Speed] = {}
    for run in runs:
        for speed in run.speeds:
            key = (speed.pool, speed.nodes, speed.devices)
            if key not in found or found[key].at < speed.at:
                found[key] = speed
    return list(found.values()), next(filter(None, map(_work, reversed(runs))), None)


def measure(site: Site, path: str, seconds: float, say: Callable[[str], None]) -> None:
    """Train for `seconds` on one node of each pool that suits the job, one after the other. Raises `SpotrunError`."""
    cluster, job = site.cluster, check(site.cluster, path)
    site.ready()
    access = site.access()
    packed = bundle.upload(access.store, Path(path).absolute().parent, job.script)
    for pool in cluster.pools:
        devices = devices_of(pool, cluster)
        if (job.pools and pool.name not in job.pools) or (devices or 1) < (job.devices or 1):
            continue
        one: dict[str, object] = {
            "nodes": {"min": 1, "max": 1},
            "pools": [pool.name],
            "after": [],
            "on": "success",
            "keep": [],
        }
        # The speed is wanted, not the result. Other jobs' `after` and `inputs`, and those who follow the group, do not
        # mean this job. Nobody looks at the node on which it fails.
        one |= {"name": measuring(job.name), "group": None, "deadline": None, "keep_on_failure": None}
        asked = {"job": job.model_dump(mode="json") | one, "code": packed.sha256}
        with ctrl_c.all_ends():
            name = control.submit(access, asked)
            try:
                say(f"measuring on pool {pool.name} for {seconds:g} s: job {name}")
                say(f"pool {pool.name}: {_measured(access, name, seconds, job.start_timeout)}")
            except BaseException:  # Ctrl-C, a pipe or a connection that broke: the job would go on and cost money
                ctrl_c.ignore_others()
                _stop(access, name)
                raise


def _stop(access: Access, name: str) -> None:
    try:
        control.ask(access, "stop", "--job", name)
    except SpotrunError as error:
        if not isinstance(error, Unreachable) and _has_ended(access, name):
            return
        stop = make_command(access.file, "stop", f"ID={name}")
        console.warn(f"job {name} may still run, and cost money; stop it with `{stop}`: {error}")


def _has_ended(access: Access, name: str) -> bool:
    with contextlib.suppress(SpotrunError):
        return control.ask(access, "status", "--job", name)["job"]["phase"] in control.ENDED
    return False


def _measured(access: Access, name: str, seconds: float, patience: float) -> str:
    """Wait until the job has trained for this time, then stop it. Returns the measured speed in words."""
    began, training = time.monotonic(), 0.0
    while True:
        state = control.ask(access, "status", "--job", name)["job"]
        if state["phase"] in control.ENDED:
            break
        now = time.monotonic()
        training = training or (now if state["samples_per_second"] else 0.0)
        late = not training and now - began > patience + seconds
        if ((training and now - training >= seconds) or late) and _asked_to_stop(access, name):
            training = training or now
            seconds = float("inf")  # ask it only once
        time.sleep(_PAUSE)
    speeds = JobState.model_validate_json(access.store.get(f"jobs/{name}/state.json")).speeds
    if not speeds:
        return f"no speed: {state['reason'] or 'the job ' + state['phase']}"
    return f"{speeds[-1].samples_per_second:,.4g} samples/s"


def _asked_to_stop(access: Access, name: str) -> bool:
    """Whether the head will stop the job. Otherwise the job goes on, or has ended meanwhile: ask again."""
    try:
        control.ask(access, "stop", "--job", name)
    except SpotrunError:
        return False
    return True


def measuring(name: str) -> str:
    """The name of the job that measures the job of this name."""
    return name[: 40 - len(_MEASURE)].rstrip("-") + _MEASURE


def _present(cluster: ClusterSpec, say: Callable[[str], None]) -> dict[str, float]:
    """The present prices, by pool. Google gives no prices, and AWS gives only those of spot machines."""
    spot = {pool.name: pool for pool in cluster.pools if pool.market == "spot"}
    if cluster.cloud == "local":
        return _local(cluster, say)
    if cluster.cloud == "gcp" or not spot:
        return {}
    try:
        with asking(cluster) as ask:
            found = ask(lambda cloud: cloud.prices())
    except SpotrunError as error:
        say(f"the cloud does not give its prices, so the shipped prices of {prices.DATE} are used: {error}")
        return {}
    # If EC2 gives no price, the price is the shipped one.
    shipped = {name: prices.spot("aws", pool.zone, pool.machine) for name, pool in spot.items()}
    return {name: found[name] for name in spot if name in found and found[name] != shipped[name]}


def _local(cluster: ClusterSpec, say: Callable[[str], None]) -> dict[str, float]:
    import asyncio

    async def ask() -> dict[str, float]:
        found = local.find(cluster.name, home())
        if found is None:
            say("prices are not known: the local cloud gives them only while it is up; `make up` brings it up")
            return {}
        try:
            return await found.prices()
        finally:
            await found.close()

    return asyncio.run(ask())


def _others(cluster: ClusterSpec, job: JobSpec) -> Iterable[Kind]:
    have = {(pool.machine, pool.market) for pool in cluster.pools}
    for each in prices.listed(cluster.cloud, cluster.region):
        devices = job.devices or each.gpus
        for market, price in (("spot", each.spot), ("on-demand", each.on_demand)):
            if price is not None and (each.machine, market) not in have and devices <= each.gpus and not job.pools:
                what = ("", cluster.region, each.machine, market, devices, job.nodes.max, price, prices.DATE)
                yield Kind(*what, _throughput(each.gpu, devices))


def _throughput(gpu: str, devices: int) -> float:
    known = GPUS_BY_NAME.get(gpu.partition("-")[0])
    return known.tflops * devices if known else 0.0


def _gpu(cluster: ClusterSpec, pool: PoolSpec) -> str:
    if pool.accelerator:
        return pool.accelerator.type.rpartition("-")[2].upper()
    return next((each.gpu for each in prices.listed(cluster.cloud, cluster.region) if each.machine == pool.machine), "")


def _seen(counts: dict[str, float]) -> tuple[float | None, float | None]:
    hours, up, down = (float(counts.get(key, 0.0)) for key in ("hours", "up", "down"))
    taken = float(counts.get("interruptions", 0.0))
    return (taken / hours if hours >= 1 else None), (up / (up + down) if up + down >= 1 else None)


def _same(run: JobSpec, job: JobSpec) -> bool:
    known = (job.name, measuring(job.name))
    return run.name in known and (run.script, run.args, run.devices) == (job.script, job.args, job.devices)


def _work(run: JobState) -> float | None:
    """The samples of the whole run."""
    newest = max(run.speeds, key=lambda each: each.at, default=None)
    return newest.samples * run.progress.total_steps if newest and run.progress.total_steps else None


def warnings(options: Iterable[Kind]) -> list[str]:
    """Warnings about prices that are old, and about prices that are not known."""
    found, each = [], list(options)
    if any(kind.priced_at not in ("", NOW) for kind in each):
        found.append(prices.warning("any"))
        found.append(f"Prices that the cloud does not give now are from {prices.DATE}.")
    unknown = [kind.pool or kind.machine for kind in each if kind.price is None]
    if unknown:
        found.append(f"No price is known for {', '.join(dict.fromkeys(unknown))}.")
    return [line for line in found if line]
