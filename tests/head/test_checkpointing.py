"""Checkpoints that fail, as data: who takes over, what is given up, and what the end of a job says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spotrun.head.agents import Agents
from spotrun.head.job_state import AbortSave, Action, Ending, Finish, JobState, Resume, Save, Saving, apply
from spotrun.head.journal import Journal
from spotrun.head.planner.plan import plan
from spotrun.head.presence import Presence
from spotrun.head.status import conditions
from spotrun.head.timeouts import TIMEOUTS
from spotrun.head.view import Node, View
from spotrun.store import Store, checkpoint_key
from spotrun.wire import JobReport, Manifest, Part, StateRef, Trouble
from tests.fakes import gcs
from tests.head.views import NOW, A, B, C, job, node, part, spec, view
from tests.head.world import World

REF = StateRef(generation=1, step=48)
FULL = "no room for a part of 9 MiB in /var/lib/spotrun/parts: 1 MiB are free"


def failing(name: str, seconds: float, **changes: Any) -> Node:
    """A node that has failed to save its part for so long."""
    trouble = Trouble(step=48, message=FULL, since=NOW - seconds - 1, at=NOW - 1, tries=3)
    found = node(name, **changes)
    return replace(found, work=found.work.replace(trouble=trouble))


def running(since: float, **changes: Any) -> JobState:
    """A job of which the checkpoint of step 48 is under way for so long, due anyway or not."""
    return job(A, B, C, saving=Saving(ref=REF, holders=(A, B, C), since=NOW - since), **changes)


def acts(given: View) -> tuple[Action, ...]:
    return tuple(each for each in plan(given).actions if isinstance(each, Save | AbortSave | Finish | Resume))


SOMETHING = "something that run.track was given"
DIFFERING: dict[str, tuple[tuple[dict[str, str], ...], str]] = {
    "agents of an older version do not tell": (({}, {}), SOMETHING),
    "one of the agents is of an older version": (({"a": "1"}, {}), SOMETHING),
    "what differs is not at the beginning of a tensor": (({"a": "1"}, {"a": "1"}), SOMETHING),
    "one object": (({"a": "1", "b": "1"}, {"a": "1", "b": "2"}), "what run.track was given as b"),
    "two objects": (({"b": "1", "a": "1"}, {"b": "2", "a": "2"}), "what run.track was given as b, a"),
    "an object that only one node has": (({"a": "1"}, {"a": "1", "b": "1"}), "what run.track was given as b"),
    "a name that no argument can have": (({"a b": "1"}, {"a b": "2"}), SOMETHING),
}


@pytest.mark.parametrize(("sketches", "what"), DIFFERING.values(), ids=list(DIFFERING))
def test_the_event_names_what_differs_between_nodes(sketches: tuple[dict[str, str], ...], what: str) -> None:
    parts = [part(number, str(number)).replace(sketch=found) for number, found in enumerate(sketches)]
    saving = Saving(ref=REF, holders=(A, B), since=NOW)
    given = view(job(A, B, saving=saving), *(node(n, parts=(p,)) for n, p in zip((A, B), parts, strict=True)))
    abort, save = acts(given)
    assert abort == AbortSave(f"{what} differs between nodes; one node saves all of it")
    assert isinstance(save, Save)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (view(running(9), failing(A, 5), node(B), node(C)), ()),
        (
            view(running(40), failing(A, TIMEOUTS.save_elsewhere + 1), node(B), node(C)),
            (AbortSave(f"a could not save its part: {FULL}"),),
        ),
        (view(running(TIMEOUTS.save_newer - 9), *(failing(n, TIMEOUTS.save_newer - 9) for n in (A, B, C))), ()),
        (
            view(running(TIMEOUTS.save_newer + 9), *(failing(n, TIMEOUTS.save_newer + 9) for n in (A, B, C))),
            (AbortSave(f"a could not save its part: {FULL}"),),
        ),
    ],
    ids=["one begins to fail", "one fails steadily", "all fail", "all fail for long: a newer state"],
)
def test_a_checkpoint_that_fails_is_given_up_only_for_something_better(given: View, expected: object) -> None:
    assert acts(given) == expected


def test_no_checkpoint_begins_before_a_worker_has_reported_its_step() -> None:
    """A new head knows only the step that the last head wrote down, and would order the same checkpoint once more."""
    due = job(A, B, C, spec=spec(checkpoint_interval=5))
    assert acts(view(due)) == ()
    assert acts(view(due, *(node(each, workers=()) for each in (A, B, C)))) == ()
    assert len(acts(view(due, node(A), node(B), node(C)))) == 1


def test_a_checkpoint_that_the_bucket_has_already_is_not_awaited() -> None:
    """No node would put a part of it into the bucket, and no other checkpoint would begin for half an hour."""
    found = acts(view(running(0, checkpoints=(REF,)), node(A), node(B), node(C)))
    assert found == (AbortSave("the bucket has this checkpoint, or a newer one"),)


def test_a_node_that_fails_steadily_takes_no_part() -> None:
    (save,) = acts(view(job(A, B, C, saved_at=NOW - 999, started=NOW - 999), failing(B, 60), node(A), node(C)))
    assert isinstance(save, Save)
    assert save.holders == (A, C)


def test_all_take_part_if_all_fail() -> None:
    given = view(job(A, B, saved_at=NOW - 999, started=NOW - 999), failing(A, 60), failing(B, 60))
    (save,) = acts(given)
    assert isinstance(save, Save)
    assert save.holders == (A, B)


def ended(**changes: Any) -> JobState:
    """A job whose script has finished; its last state is that of step 48."""
    goal = Ending(phase="succeeded", deadline=NOW + TIMEOUTS.save, state=REF)
    return job(ending=goal, last=job(A).current.members, generation=1, **changes)  # type: ignore[union-attr]


SAVING = Saving(ref=REF, holders=(A, B), since=NOW - 60)


def test_another_node_saves_the_last_state_if_one_cannot() -> None:
    here = [failing(A, TIMEOUTS.save_elsewhere + 1, phase="drained"), node(B, phase="drained")]
    assert acts(view(ended(saving=SAVING), *here)) == (Save(REF, (B,)),)


def test_the_last_state_is_waited_for_while_the_bucket_refuses() -> None:
    here = [failing(name, 300, phase="drained") for name in (A, B)]
    assert acts(view(ended(saving=SAVING), *here)) == ()


def test_a_job_fails_if_the_bucket_refuses_its_last_state_to_the_end() -> None:
    given = ended(saving=SAVING, checkpoints=(StateRef(generation=1, step=40),))
    assert given.ending is not None
    given = given.model_copy(update={"ending": given.ending.model_copy(update={"deadline": NOW - 1})})
    (end,) = acts(view(given, failing(A, 2000, phase="drained")))
    lost = f"the state after step 48 is lost, it was not saved by a ({FULL}); the newest checkpoint is of step 40"
    assert end == Finish("failed", lost)


def test_a_job_gets_time_again_for_its_last_state_after_an_outage() -> None:
    """The head, or its bucket, was away when the deadline passed: the nodes could not save the state either."""
    given = ended(saving=SAVING, checkpoints=(StateRef(generation=1, step=40),))
    assert given.ending is not None
    given = given.model_copy(update={"ending": given.ending.model_copy(update={"deadline": NOW - 1})})
    holder = failing(A, 2000, phase="drained")
    assert not any(isinstance(each, Finish) for each in acts(view(given, holder, able_since=NOW - 1)))
    assert acts(view(given, awake_since=NOW - 1)) == (), "the holder has not connected again yet"
    assert isinstance(acts(view(given, holder, able_since=NOW - TIMEOUTS.save - 1))[0], Finish)


def test_since_when_a_head_can_act() -> None:
    presence = Presence(NOW)
    presence.tick(NOW + 1)
    presence.wrote(NOW + 1)
    assert (presence.awake_since, presence.able_since) == (NOW, NOW)
    presence.refused(NOW + 2)
    presence.refused(NOW + 60)
    presence.wrote(NOW + 61)
    assert presence.able_since == NOW, "a short outage is no reason for more time"
    presence.refused(NOW + 70)
    presence.refused(NOW + 1000)
    presence.wrote(NOW + 1001)
    assert presence.able_since == NOW + 1001
    presence.tick(NOW + 4)
    assert (presence.awake_since, presence.able_since) == (NOW + 4, NOW + 1001), "a pause of 3 s"
    presence.tick(NOW + 2000)
    assert (presence.awake_since, presence.able_since) == (NOW + 2000, NOW + 2000), "it was suspended"


def test_work_whose_last_state_vanished_is_done_again() -> None:
    given = view(ended(checkpoints=(StateRef(generation=1, step=40),)), node(A, connected=False, cloud="gone"))
    (action,) = acts(given)
    assert isinstance(action, Resume)
    resumed = apply(given.job, action, NOW)
    assert (resumed.phase, resumed.ending) == ("waiting", None)


def test_a_job_without_a_state_succeeds() -> None:
    """A script that tracks nothing has none."""
    given = job(ending=Ending(phase="succeeded"))
    assert acts(view(given)) == (Finish("succeeded", ""),)


def test_status_tells_what_fails_since_when() -> None:
    (found,) = conditions(view(running(9), failing(A, 60), node(B), node(C)))
    text = f"a cannot save its part of the checkpoint of step 48 (3 tries): {FULL}"
    assert found == {"since": NOW - 61, "text": text}


def test_events_tell_when_saving_begins_to_fail_and_when_it_succeeds_again() -> None:
    notes: list[str] = []
    agents = Agents(lambda _, text: notes.append(text))

    def say(work: JobReport) -> list[str]:
        notes.clear()
        agents.receive(node(A).report.replace(jobs=(work,)), print, NOW)  # type: ignore[arg-type]
        return notes

    bad, good = failing(A, 60).work, node(A).work
    say(good)
    assert say(bad) == [f"a cannot save its part, and tries again: {FULL}"]
    assert bad.trouble is not None
    fewer = bad.trouble.model_copy(update={"message": FULL.replace("1 MiB", "0 MiB"), "tries": 4})
    assert say(bad.model_copy(update={"trouble": fewer})) == []
    other = bad.trouble.model_copy(update={"message": "HTTP 403"})
    assert say(bad.model_copy(update={"trouble": other})) == ["a cannot save its part, and tries again: HTTP 403"]
    saved = good.model_copy(update={"parts": (Part(step=48, generation=1, index=0, parts=1, files=()),)})
    assert say(saved) == ["a saves again, after 3 failed tries"]


@pytest.mark.parametrize("completed", [None, 24, 48, 72])
async def test_a_new_head_does_not_wait_for_a_checkpoint_that_is_complete(
    tmp_path: Path, completed: int | None
) -> None:
    """The last head died after it had written the manifest of a checkpoint, before it wrote down that it had."""
    world = World(tmp_path)
    state, now = await world.started(), world.clock()
    state = state.replace(phase="draining", saving=Saving(ref=REF, holders=(A, B), since=now + 60))
    world.head.journal.forget(state.id)
    await world.head.journal.write(state, [], now)
    if completed:
        manifest = Manifest(job=state.id, generation=1, step=completed, created=now, files=())
        await world.head.journal.complete(manifest, keep=3)
    world.new_head(2)
    found, *_ = await world.head.journal.take_up(state.id, 2, now)
    if completed and completed >= REF.step:
        assert found.saving is None
        assert found.newest == (1, completed)
    else:
        assert found.saving == Saving(ref=REF, holders=(A, B), since=now)


@pytest.mark.parametrize("older", [False, True], ids=["the only one", "one of two"])
async def test_a_job_whose_checkpoint_is_broken_does_not_begin_again(tmp_path: Path, older: bool) -> None:
    """Its workers are told of the checkpoint. They end, and say what they cannot read (`train.restore`)."""
    world = World(tmp_path)
    state, now = await world.started(), world.clock()
    refs = (REF, StateRef(generation=1, step=24)) if older else (REF,)
    for ref in refs[::-1]:
        manifest = Manifest(job=state.id, generation=1, step=ref.step, created=now, files=())
        await world.head.journal.complete(manifest, keep=3)
    world.head.journal.forget(state.id)
    await world.head.journal.write(state.replace(checkpoints=refs), [], now)
    world.store.put(checkpoint_key(state.id, REF.step), b"junk")
    world.new_head(2)
    found, *_ = await world.head.journal.take_up(state.id, 2, now)
    assert found.checkpoints == refs[-1:]


async def test_the_finished_state_takes_the_place_of_one_that_has_made_as_many_steps(tmp_path: Path) -> None:
    """The last generation before was interrupted after its last step, such as in an evaluation, and its state saved."""
    journal = Journal(Store(str(tmp_path)), "c")
    for generation in (1, 2):
        manifest = Manifest(job="j", generation=generation, step=48, created=1.0, files=())
        assert await journal.complete(manifest, keep=3) == [StateRef(generation=generation, step=48)]


async def test_a_checkpoint_counts_even_if_older_ones_cannot_be_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as by a rule of the account. Otherwise no checkpoint counts any more, and the job fails at its end."""
    with gcs.running("bucket") as bucket:
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        bucket.guard = lambda request, *_: request.method != "DELETE"
        journal = Journal(Store("gs://bucket"), "c")
        for step in (1, 2, 3):
            manifest = Manifest(job="j", generation=1, step=step, created=1.0, files=())
            assert (await journal.complete(manifest, keep=1))[0] == StateRef(generation=1, step=step)
        bucket.guard = None
        manifest = Manifest(job="j", generation=1, step=4, created=1.0, files=())
        assert await journal.complete(manifest, keep=1) == [StateRef(generation=1, step=4)]
