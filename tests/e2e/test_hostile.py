"""Corrupt and hostile input at every door: refused with a clear message, and everything else goes on."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import ssl
import tarfile
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import zstandard

from scripts import control, ssh
from spotrun.errors import SpotrunError
from spotrun.store import Store, checkpoint_key, code_key, head_key, host_key
from spotrun.wire import MAX_MESSAGE, NODE_HEADER, HeadRecord, HostRecord, Manifest, hash_of
from tests.e2e.harness import Harness, sample_ids
from tests.helpers import wait_for


def head_record(cluster: Harness) -> HeadRecord:
    return HeadRecord.model_validate_json(cluster.access.store.get(head_key(cluster.spec.name)))


def head_log(cluster: Harness) -> str:
    return "".join(path.read_text() for path in (cluster.access.scratch / "nodes" / "head-0").glob("*.log"))


async def knock(
    record: HeadRecord, node: HostRecord, token: str, messages: list[bytes | str], address: str = ""
) -> tuple[int, Any]:
    """Connect as this node's agent would, or from another address. (HTTP status, WebSocket close code)."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    url = f"wss://{record.address}:{record.port}/agent"
    headers = {"Authorization": f"Bearer {token}", NODE_HEADER: node.node}
    connector = aiohttp.TCPConnector(local_addr=(address or node.address, 0))
    async with aiohttp.ClientSession(connector=connector) as session:
        try:
            async with session.ws_connect(url, headers=headers, ssl=context) as link:
                for message in messages:
                    await (link.send_str(message) if isinstance(message, str) else link.send_bytes(message))
                while not link.closed:
                    await link.receive()
                return 101, link.close_code
        except aiohttp.WSServerHandshakeError as error:
            return error.status, None


def test_junk_at_the_head_while_a_job_trains(cluster: Harness) -> None:
    """Wrong tokens, junk, huge frames and wrong documents close at most their own link."""
    job = cluster.submit(nodes={"min": 2, "max": 2}, epochs=1, samples=2000, batch=4, slow=20)
    before = cluster.until_step(20)
    record, store = head_record(cluster), cluster.access.store
    key = host_key(cluster.spec.name, before["job"]["members"][0])
    node = HostRecord.model_validate_json(store.get(key))
    assert asyncio.run(knock(record, node, "wrong", [])) == (401, None)
    assert asyncio.run(knock(record, node, record.token, [])) == (401, None)
    assert asyncio.run(knock(record, node, "wrong", [], "127.0.0.1")) == (403, None)
    # From here on as someone who may write that node's own record.
    forged = node.model_copy(update={"token_sha256": hash_of("mine")})
    store.put(key, forged.model_dump_json().encode())
    junk: list[bytes | str] = ["{", "[]", "null", json.dumps({"kind": "report", "node": "x"}), b"\x00\xff"]
    assert asyncio.run(knock(record, node, "mine", junk)) == (101, 1008)
    # 1009 where the answer comes through; 1006 where the connection closed before the rest of the frame came.
    status, code = asyncio.run(knock(record, node, "mine", ["x" * (MAX_MESSAGE + 1)]))
    assert status == 101
    assert code in (1009, 1006)
    store.put(key, node.model_dump_json().encode())
    log = head_log(cluster)
    assert "wrong secret" in log
    assert "refused" in {event["kind"] for event in cluster.status()["events"]}
    assert "refused a message" in log
    job.go()
    final = cluster.until_ended()
    assert (final["phase"], final["generation"], final["interruptions"]) == (
        "succeeded",
        before["job"]["generation"],
        [],
    )
    assert sample_ids(job.out, 1) == {0: list(range(2000))}


def test_a_head_with_another_certificate_is_not_trusted(cluster: Harness) -> None:
    """head.json says otherwise: agents do not send it their token; with the right one they join, and the job runs."""
    record = head_record(cluster)
    key, store = head_key(cluster.spec.name), cluster.access.store
    wait_for(lambda: not cluster.status()["nodes"], 60, "the last job's nodes are gone")
    store.put(key, record.model_copy(update={"fingerprint": "0" * 64}).model_dump_json().encode())
    try:
        cluster.submit(nodes={"min": 1, "max": 1}, epochs=1, samples=40, batch=4)
        nodes = cluster.access.scratch / "nodes"
        wait_for(
            lambda: any("shows certificate" in path.read_text() for path in nodes.glob("spot-*/*.log")), 60, "refusal"
        )
        assert cluster.status()["job"]["phase"] == "queued"
    finally:
        store.put(key, record.model_dump_json().encode())
    assert cluster.until_ended()["phase"] == "succeeded"


def test_a_changed_host_key_is_refused(cluster: Harness) -> None:
    store, key = cluster.access.store, host_key(cluster.spec.name, "head")
    honest = store.get(key)
    record = HostRecord.model_validate_json(honest)
    other = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIIIpT6BrKPO4rUoGGYVcPgsGLDGcYbNGJIpnUA0sHjcb"
    store.put(key, record.model_copy(update={"keys": (other,)}).model_dump_json().encode())
    try:
        with pytest.raises(ssh.Unreachable, match="host key"):
            control.ask(cluster.access, "status")
    finally:
        store.put(key, honest)
    assert cluster.status()["cluster"] == cluster.spec.name


def bundle(names: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in names.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return zstandard.compress(out.getvalue())


def test_an_archive_that_reaches_outside_its_folder(cluster: Harness) -> None:
    """The job fails with a message that names the member; nothing was written; the next job runs."""
    for name in ("../escaped.py", "/tmp/spotrun-escaped.py"):
        data = bundle({"train.py": b"print('hello')\n", name: b"boo"})
        sha256 = hashlib.sha256(data).hexdigest()
        cluster.access.store.put(code_key(sha256), data)
        spec = {"script": "train.py", "name": "hostile"}
        cluster.watch(control.ask(cluster.access, "submit", data={"job": spec, "code": sha256})["job"])
        final = cluster.until_ended()
        assert final["phase"] == "failed"
        assert name in final["reason"]
    assert not Path("/tmp/spotrun-escaped.py").exists()
    assert list(cluster.access.scratch.rglob("escaped.py")) == []
    cluster.submit(nodes={"min": 1, "max": 1}, epochs=1, samples=40, batch=4)
    assert cluster.until_ended()["phase"] == "succeeded"


def test_requests_that_are_not(cluster: Harness) -> None:
    """One line each, exit status 2, and the head lives."""
    junk: list[Any] = [[], {"job": {}}, {"job": {"script": "../x.py"}, "code": "0"}, "x", {"job": 3, "code": 4}]
    for data in junk:
        with pytest.raises(SpotrunError) as caught:
            control.ask(cluster.access, "submit", data=data)
        assert not isinstance(caught.value, ssh.Unreachable)
        assert "Traceback" not in str(caught.value)
    with pytest.raises(SpotrunError, match="there is no job"):
        control.ask(cluster.access, "status", "--job", "../../etc/passwd")
    with pytest.raises(SpotrunError, match="no node 'nobody'"):
        control.ask(cluster.access, "kill", "nobody")


def test_damaged_checkpoints_are_passed_over(cluster: Harness) -> None:
    """All nodes are killed; the one before two damaged checkpoints is used, and the log names both."""
    job = cluster.submit(nodes={"min": 2, "max": 2}, epochs=2, samples=1200, batch=4, checkpoint_interval=1, slow=60)
    newest = 0
    for what in ("a checkpoint", "a second one", "a third one"):
        status = cluster.until_checkpoint_after(newest, what)
        newest = status["job"]["checkpoint"]
    cluster.fault("stockout", "local-a")
    for member in cluster.members():
        cluster.fault("kill", member)
    cluster.until(lambda s: not s["job"]["members"], what="nobody is left")
    job.go()
    *_, older, newest = steps_of(cluster.access.store, job.id)
    damaged = [truncate(cluster.access.store, job.id, newest), flip(cluster.access.store, job.id, older)]
    cluster.fault("restock", "local-a")
    final = cluster.until_ended()
    assert final["phase"] == "succeeded"
    assert final["interruptions"][0]["steps_lost"] > final["interruptions"][0]["step"] - older
    assert sample_ids(job.out, 2) == {epoch: list(range(1200)) for epoch in range(2)}
    logs = "".join(cluster.logs(job.id, final["generation"]).values())
    assert [key for key in damaged if key not in logs] == [], "the warning names the file"


def steps_of(store: Store, job: str) -> list[int]:
    """The complete checkpoints, oldest first."""
    keys = [Path(key) for key in store.list(f"jobs/{job}/checkpoints")]
    return sorted(int(key.parent.name) for key in keys if key.name == "manifest.json")


def truncate(store: Store, job: str, step: int) -> str:
    """The key of a shard whose last bytes are now missing."""
    key = shard_of(store, job, step)
    store.put(key, store.get(key)[:-5])
    return key


def flip(store: Store, job: str, step: int) -> str:
    """The key of a shard with a wrong bit."""
    key = shard_of(store, job, step)
    data = bytearray(store.get(key))
    data[-5] ^= 0x10
    store.put(key, bytes(data))
    return key


def shard_of(store: Store, job: str, step: int) -> str:
    manifest = Manifest.model_validate_json(store.get(checkpoint_key(job, step)))
    name = next(file.name for file in manifest.files if file.name.endswith(".safetensors"))
    return checkpoint_key(job, step, name)
