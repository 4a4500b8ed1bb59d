"""The cluster in Prometheus' text format (`spotrun ctl metrics`). Pure.

Names and units: https://prometheus.io/docs/practices/naming/. Values of GPUs have the names and units that NVIDIA's
DCGM exporter gives them, so that dashboards for it work:
https://github.com/NVIDIA/dcgm-exporter/blob/main/etc/default-counters.csv
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from prometheus_client import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from spotrun.head import overview
from spotrun.head.view import Node
from spotrun.readings import NAMES, OF_GPU
from spotrun.wire import Worker

if TYPE_CHECKING:
    from spotrun.head.head import Head

MIB = float(1 << 20)
_NODE = {  # by reading: name, help
    "cpu": ("spotrun_node_cpu_ratio", "Processor time in use, of all cores."),
    "memory": ("spotrun_node_memory_used_bytes", "Memory in use."),
    "memory_total": ("spotrun_node_memory_bytes", "Memory."),
    "tmpfs": ("spotrun_node_snapshots_used_bytes", "Memory file system of the snapshots: in use."),
    "tmpfs_total": ("spotrun_node_snapshots_bytes", "Memory file system of the snapshots: size."),
    "net_in": ("spotrun_node_network_receive_bytes_per_second", "Received, without the loopback interface."),
    "net_out": ("spotrun_node_network_transmit_bytes_per_second", "Sent, without the loopback interface."),
}
_GPU = {
    "use": ("DCGM_FI_DEV_GPU_UTIL", "GPU utilization (in %)."),
    "memory": ("DCGM_FI_DEV_FB_USED", "Framebuffer memory used (in MiB)."),
    "free": ("DCGM_FI_DEV_FB_FREE", "Framebuffer memory free (in MiB)."),
    "temperature": ("DCGM_FI_DEV_GPU_TEMP", "GPU temperature (in C)."),
    "power": ("DCGM_FI_DEV_POWER_USAGE", "Power draw (in W)."),
    "sm_clock": ("DCGM_FI_DEV_SM_CLOCK", "SM clock frequency (in MHz)."),
    "memory_clock": ("DCGM_FI_DEV_MEM_CLOCK", "Memory clock frequency (in MHz)."),
    "ecc": ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "Uncorrected ECC errors since the driver was loaded."),
    "throttle_bits": ("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", "Why clocks are low, as bits of NVML."),
}
_JOB = {  # by key of a job in the overview: name, help
    "step": ("spotrun_job_step", "Newest completed step."),
    "total_steps": ("spotrun_job_steps", "Steps of the whole job; 0: not known."),
    "priority": ("spotrun_job_priority", "Priority."),
    "generation": ("spotrun_job_generation", "Newest generation."),
    "goodput": ("spotrun_job_goodput_ratio", "Share of the node time that went into steps that counted."),
    "node_seconds": ("spotrun_job_node_seconds", "Node time so far."),
    "cost": ("spotrun_job_cost_dollars", "Cost so far, as far as prices are known."),
    "cost_to_end": ("spotrun_job_cost_to_end_dollars", "Cost of the whole job at the present pace."),
    "budget": ("spotrun_job_budget_dollars", "Budget."),
    "hourly": ("spotrun_job_dollars_per_hour", "What the job's machines cost now."),
    "submitted": ("spotrun_job_submitted_timestamp_seconds", "When the job was submitted."),
    "eta": ("spotrun_job_end_timestamp_seconds", "When the last step will be done at the present pace."),
    "deadline": ("spotrun_job_deadline_timestamp_seconds", "Deadline."),
    "checkpoint": ("spotrun_job_checkpoint_step", "Step of the newest complete checkpoint."),
}
_POOL = {
    "target": ("spotrun_pool_target_machines", "Machines that the pool should have."),
    "running": ("spotrun_pool_running_machines", "Machines that run."),
    "max": ("spotrun_pool_max_machines", "Machines that the pool may have."),
    "price": ("spotrun_pool_price_dollars_per_hour", "Price of a machine."),
    "on_demand": ("spotrun_pool_on_demand_price_dollars_per_hour", "Price of such a machine on demand."),
}


def text(head: Head) -> str:
    """The metrics of a head, as of now."""
    nodes = [node for node in head.fleet_view(head.clock()).nodes if node.connected]
    return generate_latest(_Found([*families(overview.of(head), nodes)])).decode()


class _Found:
    """The object that `generate_latest` asks for metrics."""

    def __init__(self, found: Sequence[Metric]) -> None:
        self._found = found

    def collect(self) -> Iterable[Metric]:
        return self._found


def families(seen: Mapping[str, Any], nodes: Iterable[Node]) -> Iterator[Metric]:
    """seen: the overview. nodes: the connected ones, with their newest reports."""
    nodes = list(nodes)
    yield _info(
        "spotrun_head", "The head.", {"cluster": seen["cluster"], "cloud": seen["cloud"]}, seen["head"]["epoch"]
    )
    yield _info(
        "spotrun_dollars_per_hour", "What running machines cost now, as far as prices are known.", {}, seen["hourly"]
    )
    # No counter: if the cloud says late that a machine had ended, the time that was counted too much is taken back.
    yield _info("spotrun_idle_cost_dollars", "What devices without a job have cost.", {}, seen["idle_cost"])
    yield from _pools(seen["pools"])
    yield from _jobs(seen["jobs"])
    yield from _nodes(seen["nodes"], nodes)
    yield from _ranks(nodes)


def _info(name: str, said: str, labels: Mapping[str, str], value: float) -> Metric:
    found = GaugeMetricFamily(name, said, labels=list(labels))
    found.add_metric([str(each) for each in labels.values()], value)
    return found


def _pools(pools: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    labels = ("pool", "zone", "machine", "market")
    rows = [([pool["name"], *(str(pool[label]) for label in labels[1:])], pool) for pool in pools]
    yield from _gauges(_POOL, labels, rows)
    short = GaugeMetricFamily(
        "spotrun_pool_short", "1 if the cloud does not give the pool its machines.", labels=labels
    )
    for values, pool in rows:
        short.add_metric(values, float(pool["short"] is not None))
    yield short


def _jobs(jobs: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    rows = [([job["id"], str(job.get("group") or "")], job) for job in jobs]
    yield from _gauges(_JOB, ("job", "group"), rows)
    phase = GaugeMetricFamily("spotrun_job_info", "1; the phase is a label.", labels=("job", "group", "phase"))
    count = GaugeMetricFamily("spotrun_job_nodes", "Nodes that the job has.", labels=("job", "group"))
    interruptions = CounterMetricFamily("spotrun_job_interruptions", "Interruptions.", labels=("job", "group"))
    lost = CounterMetricFamily("spotrun_job_lost_steps", "Steps that were done again.", labels=("job", "group"))
    for labels, job in rows:
        phase.add_metric([*labels, job["phase"]], 1)
        count.add_metric(labels, len(job["nodes"]))
        interruptions.add_metric(labels, job.get("interruptions", 0))
        lost.add_metric(labels, job.get("steps_lost", 0))
    yield from (phase, count, interruptions, lost)


def _nodes(listed: Iterable[Mapping[str, Any]], nodes: Iterable[Node]) -> Iterator[Metric]:
    names = ("node", "pool", "zone", "state", "phase")
    info = GaugeMetricFamily("spotrun_node_info", "1; the state and the phase are labels.", labels=names)
    for each in listed:
        values = (each["name"], each["pool"], each["zone"], each["state"], each["phase"] or "")
        info.add_metric([str(value) for value in values], 1)
    yield info
    reports = [node.report for node in nodes]
    rows = [([r.node, r.pool], dict(zip(NAMES, r.readings.machine, strict=False))) for r in reports]
    for _, row in rows:
        if "cpu" in row:
            row["cpu"] /= 100
    yield from _gauges(_NODE, ("node", "pool"), rows)
    gpus = [
        ([str(index), f"nvidia{index}", r.node, r.pool], _gpu(dict(zip(OF_GPU, gpu, strict=False))))
        for r in reports
        for index, gpu in enumerate(r.readings.gpus)
    ]
    yield from _gauges(_GPU, ("gpu", "device", "Hostname", "pool"), gpus)


def _gpu(row: dict[str, float]) -> dict[str, float]:
    """The values of a GPU with memory in MiB, as DCGM has it."""
    used, whole = row.get("memory"), row.pop("memory_total", None)
    if used is not None:
        row["memory"] = used / MIB
    if used is not None and whole is not None:
        row["free"] = (whole - used) / MIB
    return row


def _ranks(nodes: Iterable[Node]) -> Iterator[Metric]:
    labels = ("job", "node", "rank")
    step = GaugeMetricFamily("spotrun_rank_step_seconds", "Seconds a step, in this generation.", labels=labels)
    said = "Seconds of a step before its first gradients: until then, no rank waits for another."
    alone = GaugeMetricFamily("spotrun_rank_alone_seconds", said, labels=labels)
    factor = GaugeMetricFamily(
        "spotrun_rank_straggler_ratio", "Seconds before the first gradients / median of the job.", labels=labels
    )
    jobs: dict[str, list[tuple[str, Worker]]] = {}
    for node in nodes:
        for work in node.report.jobs:
            jobs.setdefault(work.job, []).extend(
                (node.name, each) for each in work.workers if each.step > each.base >= 0
            )
    for job, workers in jobs.items():
        middle = median(each.alone / (each.step - each.base) for _, each in workers) if workers else 0.0
        for name, each in workers:
            values, steps = [job, name, str(each.rank)], each.step - each.base
            step.add_metric(values, each.stepping / steps)
            alone.add_metric(values, each.alone / steps)
            if middle > 0:
                factor.add_metric(values, each.alone / steps / middle)
    yield from (step, alone, factor)


def _gauges(
    names: Mapping[str, tuple[str, str]], labels: Sequence[str], rows: Iterable[tuple[list[str], Mapping[str, Any]]]
) -> Iterator[Metric]:
    """A family for each name. A value that is not known is left out."""
    rows = list(rows)
    for key, (name, said) in names.items():
        found = GaugeMetricFamily(name, said, labels=labels)
        for values, row in rows:
            if isinstance(value := row.get(key), int | float) and value == value:
                found.add_metric(values, value)
        if found.samples:
            yield found
