"""What the page shows of machines: values of all nodes, and which rank is a straggler."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard

from spotrun.dashboard import machines
from spotrun.dashboard.machines import BLOCKS, Machines, spread
from spotrun.dashboard.readings import LARGEST, read
from spotrun.dashboard.records import AT_ONCE, Records
from spotrun.errors import StoreError
from spotrun.node.telemetry.gpus import Gpus
from spotrun.node.telemetry.recorder import Readings
from spotrun.store import Store, system_key
from tests.fakes.nvml import H100, Nvml
from tests.head.world import CODE, JOB, World


@pytest.fixture
async def run(tmp_path: Path) -> tuple[Machines, World, str]:
    world = World(tmp_path)
    job = await world.head.submit(JOB, CODE)
    await world.turn()
    return Machines(Records(world.store, "c")), world, job


def write(world: World, job: str, node: str, *readings: tuple[dict[str, Any], dict[int, Any]]) -> None:
    """A block as a node writes it."""
    found = Readings({"format": 1, "job": job, "node": node, "pool": "p", "gpus": ["H100"]})
    for values, ranks in readings:
        found.add(values, ranks)
    found.put(world.store, found.waiting)


def test_values_of_nodes_and_gpus(run: tuple[Machines, World, str]) -> None:
    found, world, job = run
    gpus = Gpus(Nvml(H100, H100)).read()
    write(world, job, "a", ({"time": 1.0, "cpu": 5.0, "gpus": gpus}, {}))
    write(world, job, "a", ({"time": 6.0, "cpu": 7.0}, {}))
    write(world, job, "b", ({"time": 2.0, "memory": 1, "memory_total": 4}, {}))
    a, b = found.read(job, {})["nodes"]
    assert (a["times"], a["series"]["cpu"], a["series"]["gpu1.power"]) == ([1.0, 6.0], [5.0, 7.0], [651.0, None])
    assert a["throttle"] == [[], []], "the newest reading has none"
    assert (b["series"], b["totals"]["memory"]) == ({"memory": [1]}, 4)


def test_the_rank_that_needs_longer_alone_is_slow(run: tuple[Machines, World, str]) -> None:
    """All ranks take equally long for a step, because each waits for the slowest. A new generation counts again."""
    found, world, job = run
    for node, rank, alone in (("a", 0, 0.1), ("b", 1, 0.1), ("c", 2, 0.3)):
        rows = [(100 + 5 * i, {rank: (10 * i, 5.0 * i, 10 * i * alone)}) for i in range(4)]
        rows += [(125 + 5 * i, {rank: (10 * i, 5.0 * i, 10 * i * alone)}) for i in range(1, 3)]
        write(world, job, node, *[({"time": float(at)}, ranks) for at, ranks in rows])
    ranks = found.read(job, {})["ranks"]
    assert [(each["rank"], each["node"]) for each in ranks] == [(0, "a"), (1, "b"), (2, "c")]
    assert [each["factor"] for each in ranks] == pytest.approx([1.0, 1.0, 3.0])
    assert [each["step"] for each in ranks] == pytest.approx([0.5] * 3)


def test_a_rank_that_is_gone_is_not_listed(run: tuple[Machines, World, str]) -> None:
    found, world, job = run
    for node, begin in (("old", 100.0), ("new", 900.0)):
        write(world, job, node, *[({"time": begin + 5 * i}, {0: (i, i, i)}) for i in range(3)])
    (rank,) = found.read(job, {})["ranks"]
    assert rank["node"] == "new"


JUNK = [b"", b"x", zstandard.compress(b"[1]\n"), zstandard.compress(b'{"format": 9}\n{"time": 1}\n')]
JUNK += [zstandard.compress(b'{"format": 1}\n{"time": "x"}\n{"time": 3, "gpus": 5, "ranks": {"a": 1, "0": [1]}}\n')]
JUNK += [zstandard.compress(b'{"format": 1, "gpus": 5}\n{"time": 3, "cpu": 5.0, "gpus": [{"throttle": 5}]}\n')]
JUNK += [zstandard.compress(b'{"format": 1}\n{"time": 1' + b"0" * 400 + b"}\n"), bytes(LARGEST + 1)]
LONG_RANK = b'{"time": %d, "ranks": {"' + b"9" * 5000 + b'": [%d, 1.0, 1.0]}}\n'
JUNK += [zstandard.compress(b'{"format": 1}\n' + LONG_RANK % (3, 1) + LONG_RANK % (4, 2))]


IDS = [
    "nothing",
    "no zstd",
    "no header",
    "a newer format",
    "wrong types",
    "no lists",
    "a huge number",
    "too large",
    "a long rank",
]


@pytest.mark.parametrize("junk", JUNK, ids=IDS)
def test_a_jobs_code_may_write_anything_there(run: tuple[Machines, World, str], junk: bytes) -> None:
    found, world, job = run
    write(world, job, "a", ({"time": 1.0, "cpu": 5.0}, {}))
    world.store.put(system_key(job, "a", 5), junk)
    world.store.put(system_key(job, "a", 9_000_000), junk)
    (a,) = found.read(job, {})["nodes"]
    assert 5.0 in a["series"]["cpu"]


def spoilt(*lines: str) -> bytes:
    return zstandard.compress("\n".join(('{"format": 1}', *lines, "")).encode())


def reading(time: float, **values: Any) -> str:
    return json.dumps({"time": time, **values}, separators=(",", ":"))


# In a process of its own: other threads of the tests' process allocate, too.
MEASURE = """
import json, sys, tracemalloc
from spotrun.dashboard.machines import Machines
from spotrun.dashboard.records import Records
from spotrun.store import Store

url, job = sys.argv[1:]
found = Machines(Records(Store(url), "c"))
found.read(job, {})  # imports what is imported late
found = Machines(Records(Store(url), "c"))
tracemalloc.start()
(node,) = found.read(job, {})["nodes"]
kept, peak = tracemalloc.get_traced_memory()
print(json.dumps([len(node["times"]), list(node["series"]), kept, peak]))
"""


def test_only_known_columns_are_kept(run: tuple[Machines, World, str]) -> None:
    """Of 100 KB of JSON in an object of some hundred bytes, Python would make 30 MB."""
    _, world, job = run
    for number in range(5):
        empty = reading(number, cpu=1.0, x=[{}] * 20_000)
        world.store.put(system_key(job, "a", number), spoilt(*[empty] * 20))
    command = [sys.executable, "-c", MEASURE, world.store.url, job]
    times, columns, kept, peak = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert (times, columns) == (5 * 20, ["cpu"])
    assert kept < 2 << 20
    assert peak < 16 << 20


@pytest.mark.parametrize("many", [1000, 300_000], ids=["more than a machine has", "a line that is too long"])
def test_a_node_has_64_gpus_at_most(run: tuple[Machines, World, str], many: int) -> None:
    found, world, job = run
    write(world, job, "a", ({"time": 1.0, "cpu": 5.0}, {}))
    world.store.put(system_key(job, "a", 5_000), spoilt(reading(5, gpus=[{"use": 1}] * many)))
    (a,) = found.read(job, {})["nodes"]
    assert len(a["throttle"]) == (64 if many == 1000 else 0)
    assert set(a["series"]) == {"cpu", *(f"gpu{index}.use" for index in range(len(a["throttle"])))}


def test_the_memory_of_blocks_is_bounded(run: tuple[Machines, World, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer has the newest blocks of each node, and says how many others are left out."""
    found, world, job = run
    many = [reading(second, gpus=[{"use": 1, "power": 2}] * 64) for second in range(100)]
    for node in ("a", "b"):
        for number in range(40):
            world.store.put(system_key(job, node, number), spoilt(*many))
    one = read(spoilt(*many))
    assert one
    assert one.size > 100_000
    monkeypatch.setattr(machines, "KEPT", 20 * one.size)
    answer = found.read(job, {})
    assert {len(each["times"]) for each in answer["nodes"]} == {AT_ONCE * 100}, "each node has its newest blocks"
    assert answer["left_out"] == 80 - 2 * AT_ONCE
    assert found._size <= machines.KEPT
    assert len(found._blocks) < 20


def test_an_answer_takes_bounded_time_and_the_next_one_goes_on(
    run: tuple[Machines, World, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, world, job = run
    for number in range(2 * AT_ONCE + 1):
        write(world, job, "a", ({"time": float(number), "cpu": 1.0}, {}))
    monkeypatch.setattr(machines, "PATIENCE", 0.0)
    answers = [found.read(job, {}) for _ in range(4)]
    assert [answer["left_out"] for answer in answers] == [AT_ONCE + 1, 1, 0, 0]
    assert answers[0]["nodes"][0]["times"][-1] == 2 * AT_ONCE


def test_numbers_that_are_not_finite_are_not_sent(run: tuple[Machines, World, str]) -> None:
    """JSON has no such numbers: the page could not read the answer."""
    found, world, job = run
    odd = [reading(n, cpu=math.nan, memory=-math.inf, ranks={"0": [n, math.nan, 1.0]}) for n in (1, 2)]
    world.store.put(system_key(job, "a", 1), spoilt(*odd, reading(math.nan), reading(3, cpu=5.0)))
    answer = found.read(job, {})
    assert answer["nodes"][0]["series"] == {"cpu": [None, None, 5.0]}
    json.dumps(answer, allow_nan=False)


class OnceSilent(Store):
    """A bucket that lists its objects, and does not give the first one that is asked for."""

    silent = True

    def get(self, key: str, most: int | None = None) -> bytes:
        if self.silent and "/system/" in key:
            self.silent = False
            raise StoreError("no answer")
        return super().get(key, most)


def test_a_block_that_the_bucket_did_not_give_is_read_later(run: tuple[Machines, World, str]) -> None:
    _, world, job = run
    write(world, job, "a", ({"time": 1.0, "cpu": 5.0}, {}))
    found = Machines(Records(OnceSilent(world.store.url), "c"))
    with pytest.raises(StoreError):
        found.read(job, {})
    assert found.read(job, {})["nodes"][0]["series"]["cpu"] == [5.0]


def test_a_long_run_is_read_in_part_and_the_page_says_so(run: tuple[Machines, World, str]) -> None:
    found, world, job = run
    for number in range(BLOCKS + 30):
        write(world, job, "a", ({"time": float(number), "cpu": 1.0}, {}))
    answer = found.read(job, {})
    assert answer["left_out"] == 30
    times = answer["nodes"][0]["times"]
    assert (len(times), times[0], times[-4:]) == (BLOCKS, 0.0, [146.0, 147.0, 148.0, 149.0])
    assert len(spread([f"{number}" for number in range(100_000)])) == BLOCKS
