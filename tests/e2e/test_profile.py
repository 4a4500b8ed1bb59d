"""`make profile`: a trace of some steps of a real job, while training goes on and nodes are lost."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest

from scripts import profile_requests, stack_requests
from scripts.home import home
from spotrun.errors import SpotrunError
from tests.e2e.harness import PATIENCE, Harness
from tests.helpers import wait_for


def test_training_goes_on(
    cluster: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank, then all ranks of a node. No step is lost, and nothing restarts."""
    monkeypatch.setattr(profile_requests, "FOLDER", str(tmp_path))
    job = cluster.submit(nodes={"min": 2, "max": 2}, epochs=1, samples=2400, slow=20)
    cluster.until_step(10)
    name, nodes = stack_requests.members(cluster.access, job.id, None)
    [trace], missing = profile_requests.ask(cluster.access, name, nodes, 1, 3)
    assert (trace.rank, trace.node, trace.steps, trace.problem, missing) == (1, nodes[1], 3, "", {})
    found = profile_requests.fetch(cluster.access.store, name, trace)
    assert {row.name: row.calls for row in found.operations}["Optimizer.step#AdamW.step"] == 3
    assert Path(found.path).stat().st_size > 100
    [mine], missing = profile_requests.ask(cluster.access, name, nodes[:1], None, 1)
    assert (mine.rank, mine.steps, missing) == (0, 1, {})
    capsys.readouterr()
    assert profile_requests.show(cluster.access, name, None, None, 2, json=False) == 0
    said = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"rank 0 on {nodes[0]}: 2 steps, from step [0-9]+ on", said[0])
    assert any(line.endswith("  Optimizer.step#AdamW.step") for line in said)
    assert Path(said[-2].removeprefix("trace: ").partition(",")[0]).is_file()
    with pytest.raises(SpotrunError, match=r"RANK: 7: .* has no such rank now"):
        profile_requests.show(cluster.access, name, None, 7, 1, json=True)
    job.go()
    final = cluster.until_ended()
    assert (final["phase"], final["restarts"], final["interruptions"]) == ("succeeded", 0, [])


def test_a_node_is_lost_meanwhile(cluster: Harness) -> None:
    """The profile is dropped, with a message. The survivor goes on in the same process, and can be asked again."""
    job = cluster.submit(nodes={"min": 1, "max": 2}, epochs=1, samples=2400, slow=20)
    cluster.until_step(10)
    # It begins with one, and grows, if a machine boots much later than the other.
    status = cluster.until(lambda s: len(s["job"]["members"]) == 2 and s["job"]["phase"] == "running", "two nodes")
    generation = status["job"]["generation"]
    name, nodes = stack_requests.members(cluster.access, job.id, None)
    answers: list[tuple[list[profile_requests.Trace], dict[str, str]]] = []
    asking = threading.Thread(
        target=lambda: answers.append(profile_requests.ask(cluster.access, name, nodes[:1], 0, 1000))
    )
    asking.start()
    scratch = home() / "local" / cluster.spec.name
    wait_for(lambda: [*scratch.rglob(f"profiles/{name}/0")], what="the request")
    step = int(cluster.status()["job"]["step"])
    cluster.until_step(step + 3)
    cluster.fault("stockout", "local-a")  # nobody takes the lost node's place
    cluster.fault("kill", nodes[1])
    asking.join(PATIENCE)
    [([trace], _)] = answers
    assert trace.problem == "the generation has ended; ask again when the job trains"
    cluster.until(
        lambda s: s["job"]["generation"] == generation + 1 and s["job"]["step"] > step + 10, "the survivor goes on"
    )
    [again], _ = profile_requests.ask(cluster.access, name, nodes[:1], 0, 2)
    assert (again.generation, again.steps, again.problem) == (generation + 1, 2, "")
    job.go()
    final = cluster.until_ended()
    assert final["phase"] == "succeeded"
    print("recovery:", final["interruptions"][-1]["seconds"], "s")
    steps = [json.loads(line) for line in (job.out / "steps-1-0.jsonl").read_text().splitlines()]
    assert {each["generation"] for each in steps} >= {1, generation + 1}  # generation 1's process has opened this file
