"""What a worker writes at each step, and what it learns from the agent then."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from spotrun.errors import SpotrunError
from spotrun.state.control import LAYOUT, NONE, Context, Control, Invitation


def test_a_step_is_written_as_by_the_attributes_and_returns_the_agent_s_requests(tmp_path: Path) -> None:
    worker = Control(tmp_path / "control", create=True)
    agent = Control(tmp_path / "control")
    assert worker.end_step(4, 1.5, 64.0, 0.25, 0.125) == (NONE, NONE, NONE)
    agent.stop_at, agent.snapshot_at, agent.profile = 5, 6, 7
    assert worker.end_step(5, 2.5, 128.0, 0.5, 0.375) == (5, 6, 7)
    assert (agent.step, agent.stepped_at, agent.samples) == (5, 2.5, 128.0)
    assert (agent.stepping, agent.alone) == (0.5, 0.375)
    for each in (worker, agent):
        each.close()


@pytest.mark.parametrize("found", [bytes(8), bytes(range(8))])
def test_a_block_of_another_version_is_told(tmp_path: Path, found: bytes) -> None:
    """Its numbers have other places: a worker would write its own ones where the agent looks for different ones."""
    control = Control(tmp_path / "control", create=True)
    control.checked()
    control._map[LAYOUT : LAYOUT + 8] = found
    worker = Control(tmp_path / "control")
    with pytest.raises(SpotrunError, match=r"another version.*take the cluster down, bring it up again and relaunch"):
        worker.checked()
    for each in (worker, control):
        each.close()


def test_what_an_agent_of_a_later_version_tells_is_ignored(tmp_path: Path) -> None:
    context = Context("job", 3, "spot-0", "control", "slots", "bucket", checkpoints=[(1, 2)])
    assert Context.from_text(json.dumps(dataclasses.asdict(context) | {"later": 1})) == context
    invitation = Invitation({"RANK": "1"}, "log")
    path = Invitation.path_for(tmp_path / "control")
    path.write_text(json.dumps(dataclasses.asdict(invitation) | {"later": 1}))
    assert Invitation.read(tmp_path / "control") == invitation
