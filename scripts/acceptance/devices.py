"""Compares a probe's numbers with the known figures of a GPU. Pure, except that `vit` reads logs."""

from __future__ import annotations

import re

from scripts import logs
from scripts.acceptance.record import Facts, Failed, NotRun
from scripts.acceptance.trace import Trace
from scripts.ssh import Access
from spotrun.errors import SpotrunError
from spotrun.spec import ClusterSpec
from spotrun.spec.machine_types import GPUS_BY_NAME, Gpu

# A healthy GPU reaches more than these shares of its data sheet, but not 100 %: its clock falls under load.
PRODUCT, MEMORY, BUS = 0.35, 0.6, 0.3


def figures(name: str) -> Gpu | None:
    """The known figures of a GPU by the name that the driver gives it, such as NVIDIA H100 80GB HBM3."""
    words = re.split(r"[\s-]+", name)
    return next((found for short, found in GPUS_BY_NAME.items() if short in words), None)


def matrix(found: Trace) -> Facts:
    """The speed of the slowest GPU's matrix products and memory, and its share of the data sheet."""
    lines = found.all("matrix")
    slowest = min(lines, key=lambda line: line["tflops"])
    memory = min(float(line["memory"]) for line in lines)
    facts: Facts = {"GPU": slowest["name"], "TFLOP/s": slowest["tflops"], "memory GB/s": memory, "GPUs": len(lines)}
    known = figures(slowest["name"])
    if known is None:
        return facts | {"of the data sheet": "not in the table of figures"}
    product, bandwidth = slowest["tflops"] / known.tflops, memory / known.memory
    facts |= {"share of TFLOP/s": round(product, 2), "share of memory": round(bandwidth, 2)}
    for what, share, least in (("TFLOP/s", product, PRODUCT), ("memory bandwidth", bandwidth, MEMORY)):
        if share < least:
            raise Failed(f"{what}: {share:.0%} of the data sheet's; at least {least:.0%} is usual", facts)
    return facts


def copy(found: Trace) -> Facts:
    """The lowest speed of copies to the host among all GPUs, and the longest stall of a snapshot."""
    lines = found.all("copy")
    alone = min(float(line["pinned"]) for line in lines)
    facts: Facts = {
        "pinned GB/s": alone,
        "pageable GB/s": min(float(line["pageable"]) for line in lines),
        "stall of a snapshot s": max(float(line["stall"]) for line in lines),
        "state GB": round(float(lines[0]["bytes"]) / 1e9, 2),
    }
    known = figures(str(lines[0]["name"]))
    if known is not None and alone < BUS * known.bus:
        raise Failed(f"{alone:.1f} GB/s to pinned memory; at least {BUS * known.bus:.1f} is usual", facts)
    return facts


def fork(found: Trace) -> Facts:
    """Whether each worker was forked with torch loaded, and could use CUDA."""
    lines = found.all("fork")
    facts: Facts = {"workers": len(lines), "forked": sum(bool(line["forked"]) for line in lines)}
    if slow := [line for line in lines if not line["forked"]]:
        what = f"{len(slow)} workers were not forked from a server that has torch"
        raise Failed(f"{what}: each start takes seconds", facts)
    return facts | {"first use of CUDA s": max(float(line["first"]) for line in lines)}


def tests(found: Trace) -> Facts:
    """The result of the tests for CUDA, from pytest."""
    line = found.said("tests")
    facts: Facts = {"pytest": line["summary"]}
    if line["status"] != 0:
        raise Failed(f"pytest ended with status {line['status']}: {line['summary']}; failed: {line['failed']}", facts)
    return facts


def efa(found: Trace) -> Facts:
    """Whether a machine has all the EFAs that its type has, as libfabric lists them."""
    line = found.said("fitness")
    facts: Facts = {"EFAs": line["efas"], "wanted": line["efas_wanted"]}
    if not line["efas_wanted"] or line["efas"] < line["efas_wanted"]:
        raise Failed(f"the machine has {line['efas']} EFAs of {line['efas_wanted']}", facts)
    return facts


def all_reduce(found: Trace, cluster: ClusterSpec) -> Facts:
    """Bus bandwidth between two machines, and the transport. With EFA, plain TCP is a failure."""
    line = found.said("all-reduce")
    said = str(line["transport"]) or "not named"
    facts: Facts = {"bus GB/s": line["bus"], "transport": said, "workers": line["world"], "GB": line["bytes"] / 1e9}
    facts["placement"] = str(bool(cluster.network.placement)).lower()
    if not line["right"]:
        raise Failed("the sum of the all-reduce is wrong", facts)
    if cluster.network.efa and "Libfabric" not in said:
        raise Failed(f"NCCL goes over {said}, although the cluster has EFA", facts)
    return facts


def placement(usual: Facts, moved: Trace, cluster: ClusterSpec) -> Facts:
    """Bus bandwidth between two machines that are close to each other, and between two that need not be."""
    if "bus GB/s" not in usual:
        raise NotRun("step 'all-reduce' has measured nothing to compare with")
    before, after = float(usual["bus GB/s"]), float(moved.said("all-reduce")["bus"])
    near, far = (before, after) if cluster.network.placement else (after, before)
    return {"near GB/s": near, "anywhere GB/s": far, "near is faster by": round(near / far, 2) if far else 0.0}


def vit(access: Access, found: Trace) -> Facts:
    """The samples a second that examples/vit printed last."""
    first = [log.key for log in logs.every(access.store, found.job) if log.rank == "0"]
    text = "".join(piece for key in first for piece in logs.read(access.store, key))
    rates = re.findall(r"([0-9.]+) samples/s", text)
    if not rates:
        raise SpotrunError("examples/vit printed no samples/s")
    return {"samples/s": float(rates[-1]), "goodput": round(float(found.last["goodput"] or 0.0), 3)}


def transfer(found: Trace) -> Facts:
    """The rate at which a new machine got the state, from the time that restoring took."""
    size = float(found.said("train")["mib"]) * (1 << 20)
    phases = found.interruption("kill")["phases"]
    if len(phases) < 5 or not phases[3] or not phases[4] > phases[3]:
        raise SpotrunError("the job's record does not say how long the transfer of the state took")
    seconds = phases[4] - phases[3]
    return {"state GB": round(size / 1e9, 2), "restored s": round(seconds, 2), "GB/s": round(size / 1e9 / seconds, 2)}


def segments(found: Trace) -> Facts:
    """NCCL's shared memory that no process uses, at the end of a job whose machines were taken."""
    lines = found.all("segments")
    facts: Facts = {"machines": len(lines), "segments": sum(int(line["segments"]) for line in lines)}
    if left := [f"{line['node']}: {path}" for line in lines for path in line["left"]]:
        raise Failed(f"left by killed workers: {', '.join(left)}", facts)
    return facts
