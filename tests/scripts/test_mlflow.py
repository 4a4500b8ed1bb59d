"""`make export TO=mlflow`: MLflow's own client, against a server that keeps what it is sent.

The server has the calls that the export makes, with the paths and fields of MLflow's REST API
(https://mlflow.org/docs/latest/api_reference/rest-api.html). MLflow's own server needs a hundred more packages.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest

from scripts import export_runs
from spotrun.errors import SpotrunError
from spotrun.state import points
from spotrun.state.points import Call, Header
from spotrun.store import Store, metrics_key
from tests.scripts.accounts import job, store

JOB = "train-20261122-000001"


class Server(ThreadingHTTPServer):
    """Keeps one experiment and one run. refuse: answer this error to log-batch."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.experiment = ""
        self.run: dict[str, Any] = {}
        self.batches: list[list[dict[str, Any]]] = []
        self.refuse = ""

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, call: str, data: dict[str, Any]) -> dict[str, Any] | None:
        """None: there is no such thing."""
        match call:
            case "experiments/get-by-name":
                found = {"experiment_id": "1", "name": self.experiment, "lifecycle_stage": "active"}
                return {"experiment": found} if self.experiment else None
            case "experiments/create":
                self.experiment = data["name"]
                return {"experiment_id": "1"}
            case "runs/create":
                self.run = {**data, "tags": {each["key"]: each["value"] for each in data["tags"]}, "params": {}}
                return {"run": {"info": self._info(), "data": {}}}
            case "runs/log-parameter":
                self.run["params"][data["key"]] = data["value"]
                return {}
            case "runs/log-batch":
                self.batches.append(data["metrics"])
                return {}
            case "runs/delete":
                assert data == {"run_id": "r1"}
                self.run = {}
                return {}
            case "runs/update":
                self.run |= data
                return {"run_info": self._info()}
        raise AssertionError(call)

    def _info(self) -> dict[str, Any]:
        return {"run_id": "r1", "experiment_id": "1", "status": "RUNNING", "lifecycle_stage": "active"}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path, _, query = self.path.partition("?")
        call = path.removeprefix("/api/2.0/mlflow/")
        server = cast(Server, self.server)
        found = server.answer(call, json.loads(body) if body else {"query": query})
        if call == "runs/log-batch" and server.refuse:
            return self._send(400, {"error_code": "INVALID_PARAMETER_VALUE", "message": server.refuse})
        if found is None:
            return self._send(404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no such experiment"})
        self._send(200, found)

    def _send(self, status: int, data: dict[str, Any]) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    yield found
    found.shutdown()
    thread.join(30)
    found.server_close()


@pytest.fixture
def bucket(tmp_path: Path) -> Store:
    """Step 3 of generation 1 is void: generation 2 did it again."""
    found = store(tmp_path / "bucket", job(1))
    for generation, base, steps in ((1, 0, (1, 2, 3)), (2, 2, (3, 4))):
        calls = [Call(step, 100.5 + step, values(generation * step), 0, 8.0 * step) for step in steps]
        text = points.line(Header(JOB, generation, 0, base)) + b"".join(map(points.line, calls))
        found.put(metrics_key(JOB, generation, 1), points.compress(text))
    return found


def values(number: int) -> dict[str, Any]:
    return {"loss": 1 / number, "grad%": points.to_json(math.inf if number == 2 else number)}


@pytest.mark.parametrize("known", [False, True])
def test_what_counts_arrives(server: Server, bucket: Store, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name has its own steps, times and values. The experiment is made once. A long curve goes in parts."""
    monkeypatch.setattr(export_runs, "BATCH", 3)
    server.experiment = "train" if known else ""
    assert export_runs.export(bucket, "c", JOB, "mlflow", server.uri) == {
        "where": f"run r1 of experiment train at {server.uri}",
        "points": 8,
    }
    assert [len(each) for each in server.batches] == [3, 1, 3, 1]
    sent = [each for batch in server.batches for each in batch]
    found = {(each["key"], int(each["step"])): (float(each["value"]), int(each["timestamp"])) for each in sent}
    times = {step: 100_500 + 1000 * step for step in (1, 2, 3, 4)}
    assert {step: found["loss", step] for step in times} == {
        1: (1.0, times[1]),
        2: (1 / 2, times[2]),
        3: (1 / 6, times[3]),
        4: (1 / 8, times[4]),
    }
    assert [found["grad_", step][0] for step in (1, 2, 3, 4)] == [1.0, math.inf, 6.0, 8.0]
    assert server.experiment == "train"
    assert (server.run["params"]["script"], server.run["status"]) == ("train.py", "FINISHED")
    assert server.run["tags"]["spotrun.job"] == JOB


ODD = ("grad_", "grad%", "grad#", "/a", "a//b", "a/", "..", "../up", "..x", "a/./b", ".x", "x" * 200, "line\nbreak")


def test_odd_names_arrive_and_stay_apart(server: Server, tmp_path: Path) -> None:
    """MLflow's client refuses names that are no clean paths. Two curves must not become one."""
    found = store(tmp_path / "bucket", job(1))
    call = Call(1, 100.0, {name: float(number) for number, name in enumerate(ODD)})
    found.put(metrics_key(JOB, 1, 1), points.compress(points.line(Header(JOB, 1, 0, 0)) + points.line(call)))
    assert export_runs.export(found, "c", JOB, "mlflow", server.uri)["points"] == len(ODD)
    sent = {float(each["value"]): each["key"] for batch in server.batches for each in batch}
    assert len({*sent.values()}) == len(ODD)
    assert {sent[ODD.index(name)] for name in ("grad%", "grad#")} == {"grad__2", "grad__3"}
    for name in ("grad_", ".x", "x" * 200):
        assert sent[ODD.index(name)] == name


def test_what_the_server_refuses_is_told(server: Server, bucket: Store) -> None:
    server.refuse = "too many names"
    with pytest.raises(SpotrunError, match=rf"^MLflow at {server.uri}: INVALID_PARAMETER_VALUE: too many names$"):
        export_runs.export(bucket, "c", JOB, "mlflow", server.uri)
    assert server.run == {}, "a run with a part of the numbers would look whole"


def test_a_server_that_is_not_there(bucket: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, MLflow's client tries again for four minutes."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    with socket.socket() as unheard:  # bound, but it does not listen: who connects is refused
        unheard.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        with pytest.raises(SpotrunError, match=f"^MLflow at {uri}: .*Max retries exceeded"):
            export_runs.export(bucket, "c", JOB, "mlflow", uri)
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "3"


def test_without_an_address(bucket: Store) -> None:
    with pytest.raises(SpotrunError, match="OUT is missing: give MLflow's tracking URI"):
        export_runs.export(bucket, "c", JOB, "mlflow", "")


def test_what_is_no_address(bucket: Store) -> None:
    with pytest.raises(SpotrunError, match=r"^OUT: 'http://\[::1': is not an address: Invalid IPv6 URL$"):
        export_runs.export(bucket, "c", JOB, "mlflow", "http://[::1")


def test_a_password_in_the_address_is_not_told(server: Server, bucket: Store) -> None:
    uri = server.uri.replace("://", "://ann:s3cret@")
    assert export_runs.export(bucket, "c", JOB, "mlflow", uri)["where"].endswith(f" at {server.uri}")
    server.refuse = f"not at {uri}"
    with pytest.raises(SpotrunError, match=rf"^MLflow at {server.uri}: [A-Z_]+: not at {server.uri}$"):
        export_runs.export(bucket, "c", JOB, "mlflow", uri)


def test_a_server_that_never_answers_is_not_waited_for_long(
    server: Server, bucket: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, MLflow's client waits for 8 minutes."""
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_TIMEOUT", raising=False)
    export_runs.export(bucket, "c", JOB, "mlflow", server.uri)
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "30"
