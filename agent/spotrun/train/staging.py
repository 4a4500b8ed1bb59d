"""Copying a CUDA state into a slot beside training: page-locked memory and a side stream."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

import torch

from spotrun.train.pinned import PinnedMemory

_PORTABLE = 1  # cudaHostRegisterPortable: for all devices of the process


class Copy(Protocol):
    """Copies under way on a device."""

    def guard(self) -> None:
        """Have the current stream's later work wait for the copies. The host does not wait."""

    def wait(self) -> None:
        """Wait on the host, in any thread, until the targets are filled."""

    def seconds(self) -> float | None:
        """How long they delay the current stream, measured by the device. None: not known yet."""


class Stage(Protocol):
    """Copies tensors of a device to the host."""

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on that device."""

    def capturing(self) -> bool:
        """Whether the current stream is recording a CUDA graph: nothing runs, and waiting is forbidden."""

    def pin(self, memory: torch.Tensor) -> None:
        """Let the device copy into this mapping directly. Call `unpin` before it is closed. From any thread."""

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo `pin`."""

    def start(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], beside: Sequence[bool]) -> Copy:
        """Begin to copy (source, target) pairs. beside: whether to copy each beside training, on another stream."""


class Copying:
    """A snapshot's copies under way, and whether a tensor that is copied beside training changed too early.

    Every in-place operation on a tensor raises its `_version`, which its views and detached copies share. A copy is
    torn if the version has changed when `guard` is called, or when the copies end without a call of `guard`.
    """

    def __init__(self, copy: Copy, beside: Mapping[str, torch.Tensor]) -> None:
        self._copy = copy
        self._versions = [(name, tensor, tensor._version) for name, tensor in beside.items()]
        self._lock = threading.Lock()
        self._changed: list[str] | None = None

    def guard(self) -> None:
        """Call before the copied tensors may change."""
        self._check()
        self._copy.guard()

    def doubt(self) -> None:
        """Count every tensor that is copied beside training as changed."""
        with self._lock:
            if self._changed is None:
                self._changed = [name for name, _, _ in self._versions]
                self._versions.clear()

    def seconds(self) -> float | None:
        """See `Copy`."""
        return self._copy.seconds()

    def land(self) -> list[str]:
        """Wait for the copies. Returns the names of tensors that changed too early; empty: every copy is whole."""
        self._copy.wait()
        return self._check()

    def _check(self) -> list[str]:
        with self._lock:
            if self._changed is None:
                self._changed = [name for name, tensor, version in self._versions if tensor._version != version]
                self._versions.clear()
            return self._changed


class DelayedCopy:
    """A `Copy` between tensors on the CPU, which `wait` makes: call it in another thread. pairs: (source, target)."""

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._pairs, self._over = list(pairs), threading.Event()

    def guard(self) -> None:
        """Wait until the copies are made."""
        self._over.wait()

    def wait(self) -> None:
        """Make the copies."""
        try:
            for source, target in self._pairs:
                target.copy_(source)
        finally:
            self._pairs.clear()
            self._over.set()

    def seconds(self) -> float:
        """0: no device is delayed."""
        return 0.0


def stage_for(device: torch.device) -> Stage | None:
    """The `Stage` of this device; None for the CPU: its tensors need no staging."""
    return Staging(device) if device.type == "cuda" else None


class Staging:
    """The `Stage` of a CUDA device.

    Copies beside training run on a side stream; at `guard`, the device (not the host) waits for them. All other copies
    run on the current stream, so nothing on that stream can change a tensor before its copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pins = PinnedMemory(partial(_register, device), partial(_unregister, device))

    def takes(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cuda"

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def pin(self, memory: torch.Tensor) -> None:
        self._pins.add(memory.data_ptr(), memory.numel(), memory)

    def unpin(self, memory: torch.Tensor) -> None:
        self._pins.remove(memory.data_ptr())

    def start(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], beside: Sequence[bool]) -> Copy:
        """See `Stage`. One copy at a time."""
        current = torch.cuda.current_stream()
        self._side.wait_stream(current)
        began = _now()
        held = []
        for (source, target), aside in zip(pairs, beside, strict=True):
            with torch.cuda.stream(self._side if aside else current):
                held.append(self._copy(source, target))
        last = self._side.record_event(_event()) if any(beside) else None
        return _Staged(held, last, (began, _now()))

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Begin to copy. Keep the result until the copy is over."""
        pieces = self._pins.pieces(target.data_ptr(), target.nbytes)
        if len(pieces) == 1:
            target.copy_(source, non_blocking=True)
            return source
        plain = source.resolve_conj().resolve_neg().contiguous()
        data, into = plain.reshape(-1).view(torch.uint8), target.reshape(-1).view(torch.uint8)
        for piece in pieces:
            into[piece.start : piece.stop].copy_(data[piece.start : piece.stop], non_blocking=True)
        return plain


def _register(device: torch.device, address: int, size: int) -> int:
    with torch.cuda.device(device):  # a new thread would take memory on the first device
        if code := int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE)):  # type: ignore[no-untyped-call]
            with suppress(RuntimeError):
                torch.zeros(1, device=device)  # clears the error, or the next kernel would raise it
        return code


def _unregister(device: torch.device, address: int) -> int:
    with suppress(RuntimeError), torch.cuda.device(device):  # an error of the device shows up elsewhere, too
        return int(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]
    return 1


class _Staged:
    """Copies of `Staging` under way.

    held: the sources. beside: end of the copies beside training; None: there are none. in_order: begin and end of the
    copies on the current stream.
    """

    def __init__(
        self, held: list[torch.Tensor], beside: torch.cuda.Event | None, in_order: tuple[torch.cuda.Event, ...]
    ) -> None:
        self._held, self._beside = held, beside
        self._spans = [in_order]  # times in which the current stream only copied or waited

    def guard(self) -> None:
        if self._beside is not None:
            began = _now()
            torch.cuda.current_stream().wait_event(self._beside)
            self._spans.append((began, _now()))

    def wait(self) -> None:
        for event in (self._beside, self._spans[0][1]):
            if event is not None:
                event.synchronize()
        self._held.clear()

    def seconds(self) -> float | None:
        ends = [end for _, end in self._spans]
        if self._beside is not None and len(ends) == 1:
            ends.append(self._beside)  # they ended before a guard, so nothing waits for them
        if not all(end.query() for end in ends):  # type: ignore[no-untyped-call]
            return None
        return sum(float(begin.elapsed_time(end)) for begin, end in self._spans) / 1e3


def _event() -> torch.cuda.Event:
    """An event that measures time. The host sleeps while it waits for it."""
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
    return event


def _now() -> torch.cuda.Event:
    """The moment when the current stream reaches this point."""
    event = _event()
    event.record(torch.cuda.current_stream())
    return event
