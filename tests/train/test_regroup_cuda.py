"""Workers on real GPUs that join the next generation without a restart. `test_regroup.py` imitates them on the CPU.

NCCL does not let two workers share a GPU. With gloo they can: it sums CUDA tensors in the host's memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spotrun.state.control import NEEDS_RELEASE, NONE
from tests.helpers import wait_for
from tests.train.generations import Cluster, everything, flatten
from tests.train.regroups import Regroups, release, undisturbed_final

gpu, gpus = pytest.mark.gpu, pytest.mark.gpu(devices=2)
GLOO = {"backend": "gloo"}
# Otherwise DDP rearranges its buckets, which changes the order in which the gradients of three workers are added.
KEEPS_BUCKETS: dict[str, Any] = {"ddp": {"find_unused_parameters": True}, **GLOO}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Final state of three workers on one GPU that nothing happened to."""
    cluster = Cluster(tmp_path_factory.mktemp("undisturbed"))
    assert cluster.run(["a", "b", "c"], **KEEPS_BUCKETS) == [0, 0, 0], cluster.log()
    return cluster.final()


@gpu
def test_cuda_workers_go_on_over_gloo(job: Regroups) -> None:
    """Two of them share a GPU."""
    plan = {"backend": "gloo"}
    goes_on(job, "ab", a=plan, b=plan)


@gpu
def test_a_cuda_worker_goes_on_over_nccl(job: Regroups) -> None:
    goes_on(job, "a")


@gpus
def test_cuda_workers_go_on_over_nccl(job: Regroups) -> None:
    goes_on(job, "ab", a={"gpu": "0"}, b={"gpu": "1"})


@gpu
def test_a_cuda_worker_goes_on_after_an_abort_of_nccl(job: Regroups) -> None:
    """The communicator is really aborted, and the same process makes another one."""
    job.begin("a", 1, a={"nccl_fails_at": 3})
    job.regroup(job.members)
    goes_on_alone(job)


@gpu
def test_a_peers_death_on_cuda_over_gloo(job: Regroups) -> None:
    """Two workers share a GPU. gloo notices the death."""
    job.begin("ab", 1, a={"backend": "gloo"}, b={"backend": "gloo", "die_at": 3})
    job.regroup(job.survivors())
    goes_on_alone(job)


@gpus
def test_a_peers_death_on_cuda_over_nccl(job: Regroups) -> None:
    """NCCL's kernel waits until it is aborted."""
    job.begin("ab", 1, a={"gpu": "0"}, b={"gpu": "1", "die_at": 3})
    (survivor,) = job.survivors()
    release(survivor, job.cluster.generation)
    job.regroup([survivor])
    goes_on_alone(job)


@gpu
@pytest.mark.parametrize("more", [{}, {"two_models": True}, {"collective": "last"}], ids=str)
def test_an_exact_job_on_cuda_loses_no_step(job: Regroups, memory: Path, more: dict[str, Any]) -> None:
    """The survivor goes on from its memory on the device, and a newcomer gets that state. There is no snapshot."""
    plan = {"exact": True, **GLOO, **more}
    job.begin("ab", 1000, a=plan, b={"die_at": 8, **plan})
    (survivor,) = job.survivors()
    job.regroup([survivor, job.warm_up("d", 1000, **plan)])
    assert job.end() == [0, 0], job.cluster.log()
    assert [each.control.pid for each in job.members] == job.pids()
    assert [each.control.base for each in job.members] == [8, 8]
    assert flatten(job.cluster.final()) == flatten(undisturbed_final(memory / "whole", "ab", 1000, plan))


@gpus
def test_an_exact_job_over_nccl_loses_no_step(job: Regroups) -> None:
    """NCCL's kernel waits until it is aborted. The host waits for it, so the state of the step before stays whole."""
    job.begin("ab", 1000, a={"gpu": "0", "exact": True}, b={"gpu": "1", "exact": True, "die_at": 8})
    (survivor,) = job.survivors()
    release(survivor, job.cluster.generation)
    job.regroup([survivor])
    assert job.end() == [0], job.cluster.log()
    assert survivor.control.base == 8
    assert job.cluster.seen() == everything


def goes_on_alone(job: Regroups) -> None:
    """The only worker goes on in its process, from a snapshot of the steps before the failure.

    The newest one may be dropped: its copy runs beside the step that fails.
    """
    assert job.end() == [0], job.cluster.log()
    (member,) = job.members
    assert member.control.pid == member.process.pid
    assert member.control.base in (2, 3)
    assert job.cluster.seen() == everything


def goes_on(job: Regroups, nodes: str, **plans: dict[str, Any]) -> None:
    """The same processes are in three generations, and serve each sample once an epoch."""
    job.begin(nodes, stop_at=2, **plans)
    job.regroup(job.members, stop_at=5)
    job.regroup(job.members)
    assert job.end() == [0] * len(nodes), job.cluster.log()
    assert [each.control.pid for each in job.members] == job.pids()
    assert [each.control.able for each in job.members] == [NEEDS_RELEASE] * len(nodes)
    assert job.cluster.seen() == everything
    final = [flatten(job.cluster.final(rank)) for rank in range(len(nodes))]
    assert all(each[:-2] == final[0][:-2] for each in final), "but for the random numbers of each rank"


@gpu
def test_a_newcomer_on_cuda_takes_the_place_of_one_that_leaves(job: Regroups, undisturbed: Any) -> None:
    """It gets the state of the others. No bit of the result differs."""
    job.begin("abc", stop_at=4, a=KEEPS_BUCKETS, b=KEEPS_BUCKETS, c=KEEPS_BUCKETS)
    first, _, last = job.members
    job.regroup([first, job.warm_up("d", **KEEPS_BUCKETS), last])
    assert job.end() == [0, 0, 0], job.cluster.log()
    assert flatten(job.cluster.final()) == flatten(undisturbed)


@gpu
@pytest.mark.parametrize("interval", [1, 2])
def test_a_spare_on_cuda_takes_the_place_of_a_dead_peer(job: Regroups, undisturbed: Any, interval: int) -> None:
    """The survivors go on in their processes, from the newest snapshot. No bit of the result differs."""
    job.begin("abc", interval, a=KEEPS_BUCKETS, b={"die_at": 3, **KEEPS_BUCKETS}, c=KEEPS_BUCKETS)
    survivors = job.survivors()
    job.regroup([*survivors, job.warm_up("d", interval, **KEEPS_BUCKETS)])
    assert job.end() == [0, 0, 0], job.cluster.log()
    assert [each.control.pid for each in job.members] == job.pids()
    (base,) = {each.control.base for each in job.members}
    assert base in (2, 3 // interval * interval)
    assert job.cluster.seen() == everything
    assert flatten(job.cluster.final()) == flatten(undisturbed)


@gpu
@pytest.mark.parametrize(
    "more",
    [{"accumulate": 2}, {"two_models": True}, {"compiles": True}, {"collective": "first"}],
    ids=str,
)
def test_scripts_on_cuda_are_exact_after_a_death(job: Regroups, memory: Path, more: dict[str, Any]) -> None:
    """The result equals that of an undisturbed job."""
    plan = {**GLOO, **more}
    job.begin("ab", 1, a=plan, b={"die_at": 3, **plan})
    (survivor,) = job.survivors()
    job.regroup([survivor, job.warm_up("d", 1, **plan)])
    assert job.end() == [0, 0], job.cluster.log()
    assert job.cluster.seen() == everything
    assert flatten(job.cluster.final()) == flatten(undisturbed_final(memory / "whole", "ab", 1, plan))


@gpu
def test_a_released_worker_on_cuda_leaves_a_frozen_peer(job: Regroups) -> None:
    """The survivor waits in a collective until it is released."""
    job.begin("ab", 1, a=GLOO, b={"die_at": 3, "freezes": True, **GLOO})
    survivor, frozen = job.members
    wait_for(lambda: survivor.control.committed == 3, 60)
    assert survivor.control.left == NONE
    release(survivor, job.cluster.generation)
    job.regroup([survivor])
    frozen.process.kill()
    assert job.end() == [0], job.cluster.log()
    assert job.cluster.seen() == everything
