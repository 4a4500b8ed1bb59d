"""What a worker writes at each step, and what it learns from the agent then."""

from __future__ import annotations

from pathlib import Path

from spotrun.state.control import NONE, Control


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
