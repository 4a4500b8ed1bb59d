"""A worker dies, or freezes, while a state is sent: all others end as soon as the agents release them."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spotrun.state.slots import Record
from spotrun.train import connections, streams, transfer
from spotrun.train.distributed import join_process_group
from spotrun.train.slot_files import layout
from spotrun.train.streams import Address, Listener, Streams
from tests.helpers import SLOW, wait_for
from tests.train.forks import forked
from tests.train.meeting import meeting

DONOR, FIRST, SECOND = range(3)  # FIRST passes the state on to SECOND
ENDED, FAILED = 0, 3  # exit codes
SIZE = 1 << 26  # bytes of each tensor: more than sockets hold
MIDDLE = 20  # pieces that FIRST has received when something happens


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("who", [DONOR, FIRST, SECOND], ids=["donor", "first", "second"])
def test_a_worker_is_gone_in_the_middle_of_a_transfer(tmp_path: Path, who: int, fault: signal.Signals) -> None:
    """A dead one ends its connections. For a frozen one, the agents release the others."""
    with meeting(3) as group:
        ranks = [forked.Process(target=take_part, args=(group, rank, tmp_path), daemon=True) for rank in range(3)]
        for each in ranks:
            each.start()
        try:
            wait_for((tmp_path / "middle").exists, what="the middle of the transfer")
            pid = ranks[who].pid
            assert pid is not None
            os.kill(pid, fault)
            if fault == signal.SIGSTOP:
                (tmp_path / "released").touch()
            for rank in {DONOR, FIRST, SECOND} - {who}:
                ranks[rank].join(30 * SLOW)
        finally:
            for each in ranks:
                each.kill()
                each.join()
    codes = [each.exitcode for each in ranks]
    if (who, codes[DONOR]) == (SECOND, ENDED):  # FIRST receives everything before it looks at what it passes on
        codes[DONOR] = FAILED
    assert codes == [-signal.SIGKILL if rank == who else FAILED for rank in range(3)]


def take_part(group: dict[str, str], rank: int, folder: Path) -> None:
    """A worker's part in the transfer. Each piece takes some milliseconds."""
    os.environ.update(group, RANK=str(rank), LOCAL_RANK="0")
    join_process_group(torch.device("cpu"), "gloo")
    listener, received, fill = Listener(), [0], streams.fill
    addresses = [torch.zeros(4, dtype=torch.int64) for _ in range(3)]
    dist.all_gather(addresses, torch.tensor(listener.address.numbers))
    threading.Thread(target=obey, args=(folder / "released",), daemon=True).start()

    def fill_slowly(connection: socket.socket, room: memoryview) -> None:
        time.sleep(0.02)
        fill(connection, room)
        received[0] += 1
        if rank == FIRST and received[0] >= MIDDLE:
            (folder / "middle").touch()
            time.sleep(0.5)

    transfer.fill = fill_slowly  # type: ignore[attr-defined]
    try:
        if rank == DONOR:
            tensors = {name: torch.full((SIZE,), number, dtype=torch.uint8) for number, name in enumerate("abcd")}
            source = transfer.OwnState(Record("job", 1, 7, 0, "", {}), layout(tensors), tensors)
            transfer.send(source.record, source, listener)
        else:
            before = Address.read(addresses[rank - 1].tolist())
            transfer.receive({}, before, listener if rank == FIRST else None)
        listener.wait()
    except dist.DistError:
        os._exit(FAILED)
    os._exit(ENDED)


def obey(released: Path) -> None:
    """What a worker does if its agent releases it."""
    while not released.exists():
        time.sleep(0.02)
    connections.break_all()


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(connections, "broken", False)
    found = Listener()
    yield found
    found.close()
    assert not connections.transfers


STATE = {"large": torch.arange(3_000_000), "small": torch.arange(7.0), "empty": torch.zeros(0, 3)}


def begin(listener: Listener, number: int = 1) -> None:
    """Begin to send a state."""
    source = transfer.OwnState(Record("job", number, 7, 0, "", {"x": 1}), layout(STATE), STATE)
    transfer.send(source.record, source, listener)


def test_a_state_arrives_in_the_tensors_that_are_there(listener: Listener) -> None:
    begin(listener)
    own = {"large": torch.zeros(3_000_000, dtype=torch.int64), "small": torch.zeros(8)}
    record, received, whole = transfer.receive(own, listener.address)
    listener.wait()
    assert whole
    assert record == Record("job", 1, 7, 0, "", {"x": 1})
    assert received.tensor("large") is own["large"]
    assert all(received.tensor(name).equal(tensor) for name, tensor in STATE.items())


@pytest.mark.gpu
@pytest.mark.parametrize("passed_on", [False, True])
def test_cuda_a_state_goes_from_device_to_device(listener: Listener, passed_on: bool) -> None:
    """Small and large tensors, some of them not contiguous, arrive in the tensors that the receivers have there."""
    state = {
        "large": torch.arange(9_000_000, device="cuda"),
        "turned": torch.arange(1_000_000.0, device="cuda").view(1000, 1000).t(),
        "host": torch.arange(2_000_000),
        **{f"small{number}": torch.full((number,), number, device="cuda") for number in range(9)},
    }
    source = transfer.OwnState(Record("job", 1, 7, 0, "", {}), layout(state), state)
    transfer.send(source.record, source, listener)
    own = [{name: torch.zeros(each.shape, dtype=each.dtype, device=each.device) for name, each in state.items()}] * 2
    own[1] = {name: each.clone() for name, each in own[0].items()}
    between = Listener() if passed_on else None
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(transfer.receive, own[1], between.address) if between is not None else None
        found = [transfer.receive(own[0], listener.address, between)]
        listener.wait()
        found += [second.result(30)] if second is not None else []
    for into, (_, received, whole) in zip(own, found, strict=False):
        assert whole
        assert all(received.tensor(name) is each for name, each in into.items())
        assert all(each.equal(state[name]) for name, each in into.items())


def test_a_transfer_does_without_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver may refuse to lock more. Here, there is no driver."""
    empty, asked = torch.empty, list[bool]()

    def refuse(*sizes: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        asked.append(pin_memory)
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*sizes, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    buffer = transfer._host_memory(10, locked=True)
    assert asked == [True, False]
    assert (buffer.nbytes, buffer.is_pinned()) == (10, False)
    transfer.reserve()


def test_damage_is_noticed(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = streams.fill

    def damage(connection: socket.socket, room: memoryview) -> None:
        fill(connection, room)
        if room.nbytes == transfer.PIECE:
            room[5] ^= 1

    monkeypatch.setattr(transfer, "fill", damage)
    begin(listener)
    assert not transfer.receive({}, listener.address)[2]
    listener.wait()


def test_strangers_get_nothing(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has another secret, says nothing, or wants a stream that there is not, disturbs nobody."""
    monkeypatch.setattr(streams, "INTRODUCTION", 2.0)
    place, others = (listener.address.host, listener.address.port), Streams()
    wrong = Address(*place, listener.address.secret ^ 1)
    with others.connect(wrong, 0) as thief, socket.create_connection(place, 30) as silent:
        with others.connect(listener.address, 200) as strange:
            begin(listener)
            assert thief.recv(100) == silent.recv(100) == strange.recv(100) == b""
        assert transfer.receive({}, listener.address)[2]
        listener.wait()
    others.close()


def test_a_sender_that_does_not_listen_any_more_is_gone(listener: Listener) -> None:
    listener.close()
    with pytest.raises(dist.DistError, match="Connection refused"):
        transfer.receive({}, listener.address)


def test_who_never_comes_is_not_waited_for(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "SILENCE", 0.1)
    begin(listener)
    with pytest.raises(dist.DistError, match="the transfer of the state has failed: timed out"):
        listener.wait()


def test_nobody_waits_for_a_silent_sender(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine answers, but nothing comes."""
    monkeypatch.setattr(streams, "SILENCE", 0.1)
    with pytest.raises(dist.DistError, match="timed out"):
        transfer.receive({}, listener.address)


def test_no_transfer_begins_once_the_connections_are_broken(listener: Listener) -> None:
    """Until this process has joined another group."""
    begin(listener)
    connections.break_all()
    with pytest.raises(dist.DistError):
        listener.wait()
    with pytest.raises(dist.DistError, match="given up"):
        transfer.receive({}, listener.address)
    with pytest.raises(dist.DistError, match="given up"):
        Listener()


@pytest.mark.parametrize("host", ["127.0.0.1", "10.250.3.4", "2001:db8::ffff", "fd00::1"])
def test_an_address_travels_as_numbers(host: str) -> None:
    address = Address(host, 65535, (1 << 63) - 1)
    assert Address.read(torch.tensor(address.numbers, dtype=torch.int64).tolist()) == address


def test_a_release_that_comes_while_a_worker_begins_to_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is known that this worker listens, and after that."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for name in ("__init__", "_hold"):
        monkeypatch.setattr(connections, "broken", False)
        call = getattr(Streams, name)

        def released(*args: Any, call: Any = call, begins: bool = name == "__init__") -> None:
            if begins:
                connections.break_all()
            call(*args)
            if not begins:
                connections.break_all()

        with monkeypatch.context() as patched:
            patched.setattr(Streams, name, released)
            with pytest.raises(dist.DistError, match=r"given up|has failed"):
                listen_and_send()
        assert not connections.transfers


def listen_and_send() -> None:
    found = Listener()
    begin(found)
    found.wait()


def test_the_bytes_of_all_streams_are_about_the_same() -> None:
    """A layer's weight and its bias come in turn."""
    sizes = [3 << 20, 4096] * 20
    tensors = {str(number): torch.zeros(size, dtype=torch.uint8) for number, size in enumerate(sizes)}
    dealt = transfer.deal(transfer.pieces_of(layout(tensors)), 8)
    loads = [sum(piece.stop - piece.start for piece in each) for each in dealt]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= 4 << 20


def test_who_passes_a_state_on_has_done_so_when_it_has_received_it(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object of the script may change what it loads."""
    begin(listener)
    send_all, between = streams._send_all, Listener()

    def slowly(connection: socket.socket, items: Any) -> None:
        for data in items:
            time.sleep(0.02)
            send_all(connection, [data])

    monkeypatch.setattr(streams, "_send_all", slowly)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(transfer.receive, {}, between.address)
        received = transfer.receive({}, listener.address, between)[1]
        received.tensor("large").zero_()
        listener.wait()
        _, last, whole = second.result(30)
    assert whole
    assert all(last.tensor(name).equal(tensor) for name, tensor in STATE.items())


@pytest.mark.parametrize(("name", "master"), [("lo", "192.0.2.1"), ("none0", "127.0.0.7"), ("", "127.0.0.7")])
def test_a_worker_listens_on_the_network_of_gloo(name: str, master: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", master)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    assert streams._own_host() == "127.0.0.1"


def test_a_machine_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine may have taken the address over: the others go on without this worker."""
    monkeypatch.setattr(streams, "_own_host", lambda: "192.0.2.1")
    with pytest.raises(dist.DistError, match="cannot listen"):
        Listener()


JUNK = ["no JSON", '{"record": {}, "streams": 1}', '{"record": {"x": 1}, "streams": 1}', '{"record": {}, "streams": 0}']


@pytest.mark.parametrize("note", JUNK)
def test_a_state_that_makes_no_sense(listener: Listener, note: str) -> None:
    header = transfer.OwnState(Record("job", 1, 7, 0, "", {}), layout(STATE), STATE).header
    listener.send(lambda _: [streams.framed(note.encode()) + streams.framed(header)], 1)
    with pytest.raises(dist.DistError, match="cannot be read"):
        transfer.receive({}, listener.address)


def test_a_message_that_is_too_long(listener: Listener) -> None:
    listener.send(lambda _: [b"\xff" * 100], 1)
    with pytest.raises(dist.DistError, match="bytes at once"):
        transfer.receive({}, listener.address)
