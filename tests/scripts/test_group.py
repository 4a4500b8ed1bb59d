"""Following the jobs of a group: each until its end, over real SSH to a stand-in for the head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts import group, ssh
from spotrun.errors import SpotrunError
from tests.fakes.cluster import Machines, machines
from tests.scripts.statuses import row, status


@pytest.fixture
def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    monkeypatch.setattr(group, "EVERY", 0.0)
    with machines(tmp_path) as found:
        yield found


class Recorder:
    """Keeps the phases that it is shown, and then calls the next of some functions."""

    def __init__(self, *then: Callable[[], None]) -> None:
        self.then = list(then)
        self.shown: list[dict[str, str]] = []
        self.said: list[str] = []

    def show(self, jobs: list[dict[str, Any]]) -> None:
        self.shown.append({job["id"]: job["phase"] for job in jobs})
        if self.then:
            self.then.pop(0)()

    def say(self, text: str) -> None:
        self.said.append(text)


def answer(standin: Machines, *rows: dict[str, Any], **job: Any) -> None:
    """What the head says next: these jobs have not ended. job: the one that it is asked for by id."""
    standin.write(status_json={**status(**job), "jobs": [row("other-1"), *rows]})


def trial(number: int, **keys: Any) -> dict[str, Any]:
    return row(f"trial-{number}", group="search", **keys)


def test_a_group_is_followed_until_its_last_job_has_ended(standin: Machines) -> None:
    answer(standin, trial(1), trial(2, phase="queued"))
    seen = Recorder(
        lambda: answer(standin, trial(2), trial(3), id="trial-1", phase="succeeded"),  # another one is submitted
        lambda: answer(standin, trial(3), id="trial-2", phase="failed"),
        lambda: answer(standin, id="trial-3", phase="succeeded"),
    )
    ended = group.follow(standin.access, "search", seen)
    assert seen.shown == [
        {"trial-1": "running", "trial-2": "queued"},
        {"trial-1": "succeeded", "trial-2": "running", "trial-3": "running"},
        {"trial-1": "succeeded", "trial-2": "failed", "trial-3": "running"},
        {"trial-1": "succeeded", "trial-2": "failed", "trial-3": "succeeded"},
    ]
    assert [job["phase"] for job in ended] == ["succeeded", "failed", "succeeded"]


def test_a_group_without_jobs_is_a_mistake(standin: Machines) -> None:
    answer(standin)
    with pytest.raises(SpotrunError, match="group search has no job that has not ended; `make jobs` lists the groups"):
        group.follow(standin.access, "search", Recorder())


def test_following_a_group_outlives_the_head(standin: Machines) -> None:
    answer(standin, trial(1))

    def away() -> None:
        (standin.folder / "status.json").unlink()

    def look() -> None:
        answer(standin, id="trial-1", phase="succeeded")

    seen = Recorder(away)
    assert [job["phase"] for job in group.follow(standin.access, "search", seen, look)] == ["succeeded"]
    assert len(seen.said) == 1
    assert seen.said[0].startswith("the head is away (")


def test_following_a_group_ends_when_the_cluster_is_taken_down(standin: Machines) -> None:
    answer(standin, trial(1))

    def down() -> None:
        raise ssh.Unreachable("cluster c is not up")

    with pytest.raises(ssh.Unreachable, match="cluster c is not up"):
        group.follow(standin.access, "search", Recorder((standin.folder / "status.json").unlink), down)


def test_lines_about_a_group_say_what_has_changed(capsys: pytest.CaptureFixture[str]) -> None:
    listener = group.Plain("search")
    listener.show([trial(1), trial(2, phase="queued", reason="waits for 1 device", step=0, total_steps=0)])
    listener.show([trial(1, step=11), trial(2)])
    assert [line[9:] for line in capsys.readouterr().out.splitlines()] == [
        "running     trial-1, step 10/100",
        "queued      trial-2 (waits for 1 device), step 0",
        "group       search: 1 running, 1 queued",
        "running     trial-2, step 10/100",
    ]
