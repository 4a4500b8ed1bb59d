"""What the soak is made of: scenarios from seeds, its checks, its broken bucket, its table. One seed runs in `e2e`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import bench.soak.__main__ as soak
from bench.soak.checks import Beat, check_failures, check_samples, check_waits, check_weights
from bench.soak.drive import Outcome
from bench.soak.plan import FAULTS, LASTING, NOTICES, SHAPES, Scenario, scenario
from bench.soak.site import Bucket, Site
from bench.soak.table import LEGEND, render
from spotrun.errors import NotFound, StoreError
from spotrun.store import Store

HUNDRED = [scenario(seed) for seed in range(1, 101)]


def test_a_seed_is_one_scenario() -> None:
    assert [scenario(seed) for seed in range(1, 101)] == HUNDRED
    assert len({(each.shape, each.least, each.most, each.faults) for each in HUNDRED}) == 100


def test_a_hundred_seeds_have_everything() -> None:
    kinds = Counter(fault.kind for each in HUNDRED for fault in each.faults)
    assert set(kinds) == set(FAULTS)
    assert min(kinds.values()) >= 10
    assert {each.shape for each in HUNDRED} == set(SHAPES)
    assert {each.most for each in HUNDRED if each.fixed} == {1, 2, 3, 4}
    assert any(not each.fixed for each in HUNDRED)
    assert {each.spares for each in HUNDRED} == {0, 1}
    assert {(each.gpu, each.exact) for each in HUNDRED} == {(False, False), (True, False), (True, True)}
    assert {fault.seconds for each in HUNDRED for fault in each.faults if fault.kind == "preempt"} == set(NOTICES)


def test_every_scenario_can_be_played() -> None:
    for each in HUNDRED:
        assert 1 <= each.least <= each.most <= 4
        assert [fault.at for fault in each.faults] == sorted(fault.at for fault in each.faults)
        assert all(0 < fault.at < 1 for fault in each.faults)
        assert all(fault.seconds > 0 for fault in each.faults if fault.kind in LASTING)
        assert str(each.samples) in each.arguments("out")


def entry(step: int, ids: list[int], generation: int = 1, epoch: int = 0) -> dict[str, Any]:
    return {"step": step, "ids": ids, "generation": generation, "epoch": epoch}


@pytest.mark.parametrize(
    ("entries", "wrong"),
    [
        pytest.param([entry(1, [0, 1]), entry(2, [2])], [], id="each once"),
        pytest.param([entry(1, [0]), entry(1, [1]), entry(2, [2])], [], id="two ranks"),
        pytest.param([entry(1, [0, 1]), entry(2, [2]), entry(2, [2], 2)], [], id="a step done again"),
        pytest.param(
            [entry(1, [0, 1]), entry(2, [2]), entry(3, [0, 1], epoch=1)]
            + [entry(step, [step - 1], 2) for step in (1, 2, 3)],
            [],
            id="a step done again in an earlier epoch",
        ),
        pytest.param([entry(1, [0, 1])], ["epoch 0: 1 samples of 3 never seen, 0 seen again"], id="one missing"),
        pytest.param(
            [entry(1, [0, 1]), entry(2, [2, 1])], ["epoch 0: 0 samples of 3 never seen, 1 seen again"], id="one twice"
        ),
        pytest.param(
            [entry(1, [0, 1]), entry(2, [2]), entry(2, [0], 2)],
            ["epoch 0: 1 samples of 3 never seen, 1 seen again"],
            id="done again with another sample",
        ),
    ],
)
def test_check_samples(entries: list[dict[str, Any]], wrong: list[str]) -> None:
    assert check_samples(entries, 1, 3) == wrong


def test_check_weights() -> None:
    assert check_weights("a" * 64, "a" * 64) == []
    assert check_weights("a" * 64, "b" * 64) == ["final state aaaaaaaaaaaa, undisturbed bbbbbbbbbbbb"]


def test_check_failures() -> None:
    assert check_failures(0) == []
    assert check_failures(2) == ["2 failures were counted, and the script never fails"]


STEADY = [Beat(float(at), at, 0) for at in range(11)]  # a step a second, nothing saved


@pytest.mark.parametrize(
    ("beats", "excused", "wrong"),
    [
        pytest.param(STEADY, [], [], id="steady"),
        pytest.param([*STEADY, Beat(29.0, 11)], [], [], id="work of 10 s and the constant"),
        pytest.param([*STEADY, Beat(31.0, 11)], [], ["21 s without a step after step 10; allowed 20 s"], id="too long"),
        pytest.param([*STEADY, Beat(25.0, 10), Beat(31.0, 11)], [], ["21 s without"], id="no progress between"),
        pytest.param([*STEADY, Beat(31.0, 11)], [(12.0, 15.0), (14.0, 16.0)], [], id="kept from stepping"),
        pytest.param(
            [*STEADY[:-1], Beat(10.0, 10, 8), Beat(24.0, 11)], [], ["14 s without a step after step 10; allowed 12 s"],
            id="what is saved is not waited for",
        ),
        pytest.param([], [], [], id="never began"),
    ],
)  # fmt: skip
def test_check_waits(beats: list[Beat], excused: list[tuple[float, float]], wrong: list[str]) -> None:
    found = check_waits(beats, excused, constant=10.0)
    assert len(found) == len(wrong)
    assert all(said in each for said, each in zip(wrong, found, strict=True))


def test_a_bucket_that_does_not_answer(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "bucket"))
    store.put("a/b", b"1")
    bucket = Bucket(tmp_path / "bucket")
    bucket.disturb(None)
    for ask in (lambda: store.get("a/b"), lambda: store.put("a/b", b"2"), lambda: store.create("a/c", b"2")):
        with pytest.raises(StoreError):
            ask()
        with pytest.raises(StoreError) as caught:
            store.find("a/b")
        assert not isinstance(caught.value, NotFound), "an object that cannot be read is not one that is not there"
    bucket.restore()
    bucket.restore()
    assert store.get("a/b") == b"1"
    assert store.list("a") == ["a/b"]


def test_a_bucket_that_answers_now_and_then(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "bucket"))
    store.put("a", b"1")
    bucket, seen = Bucket(tmp_path / "bucket"), set[bytes | str]()
    bucket.disturb(0.01)
    try:
        while len(seen) < 2:
            try:
                seen.add(store.get("a"))
            except StoreError:
                seen.add(b"")
    finally:
        bucket.restore()
    assert store.get("a") == b"1"


def test_the_table() -> None:
    outcomes = [Outcome(each, done=list(each.faults), interruptions=1, longest=2.0) for each in HUNDRED[:10]]
    outcomes[3].problems.append("Traceback\n  ...\nValueError: no")
    text = render(outcomes, "a computer", "2026-01-01")
    assert "10 runs, seeds 1 to 10: 9 held, 1 failed. Commit unknown, 2026-01-01, a computer." in text
    assert "Seed 4: ValueError: no" in text
    assert "| all | 10 | 1 | 10 | 0 | 2.0 s, 2.0 s |" in text
    gpu = sum(each.scenario.gpu for each in outcomes)
    assert f"| of these, as on GPUs (`bench/soak/job/as_gpu.py`) | {gpu} |" in text
    exact = sum(each.scenario.exact for each in outcomes)
    assert f"| as on GPUs, with `exact: true` | {exact} |" in text
    assert set(LEGEND) == {shape.name for shape in SHAPES}


def test_a_soak_that_was_broken_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in its third run: the table has two runs. Resumed, it begins with the third."""
    played: list[int] = []

    def drive(wanted: Scenario, folder: Path, known: object) -> Outcome:
        if wanted.seed == 3 and 3 not in played:
            played.append(3)
            raise KeyboardInterrupt
        played.append(wanted.seed)
        return Outcome(wanted, done=list(wanted.faults), longest=1.0)

    monkeypatch.setattr(soak, "drive", drive)
    monkeypatch.setattr(soak, "adopt_orphans", lambda: None)
    monkeypatch.setattr(soak, "sweep", lambda: None)
    words = ["bench.soak", "--runs", "4", "--keep", str(tmp_path)]
    monkeypatch.setattr("sys.argv", words)
    assert soak.main() == 130
    said = capsys.readouterr().out
    assert "broken off after 2 of 4 runs; to go on: make soak RUNS=4 SEED=1 ARGS=--resume" in said
    assert "2 runs, seeds 1 to 2: 2 held, 0 failed." in said
    monkeypatch.setattr("sys.argv", [*words, "--resume"])
    assert soak.main() == 0
    assert played == [1, 2, 3, 3, 4]
    assert "4 runs, seeds 1 to 4: 4 held, 0 failed." in capsys.readouterr().out


def test_a_soak_that_is_ended_while_a_cluster_comes_up_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("SPOTRUN_HOME", "")  # restored at the end: a site sets it
    site = Site(tmp_path, HUNDRED[0])
    monkeypatch.setattr("bench.soak.site.cloud.find", interrupt)
    with pytest.raises(KeyboardInterrupt):
        site.up()
    assert site.layout.tmpfs.exists()
    assert site.close() == []
    assert not site.layout.tmpfs.exists()
