"""Copying a CUDA state to the host without holding up training: pinned memory and a side stream."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

_ALIGN = 64


class Copy(Protocol):
    """Copies under way on a device."""

    def guard(self) -> None:
        """Put what the current stream is given from now on behind the copies. The host does not wait."""

    def wait(self) -> None:
        """Wait on the host, in any thread, until the targets are filled."""


class Stage(Protocol):
    """Copies tensors of a device to the host."""

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on that device."""

    def capturing(self) -> bool:
        """Whether the current stream is being recorded into a CUDA graph: nothing runs, and nothing may be awaited."""

    def start(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], beside: Sequence[bool]) -> Copy:
        """Begin to copy (source, target) pairs. beside: not in the current stream's order, but beside what follows."""


class Copying:
    """A snapshot's copies under way, and whether what is copied beside training changed too early.

    Every in-place operation on a tensor raises the `_version` that it shares with its views and detached copies. The
    copies are torn if a version has changed when `guard` is called, or when they are over without a call of it.
    """

    def __init__(self, copy: Copy, beside: Mapping[str, torch.Tensor]) -> None:
        self._copy = copy
        self._versions = [(name, tensor, tensor._version) for name, tensor in beside.items()]
        self._lock = threading.Lock()
        self._changed: list[str] | None = None

    def guard(self) -> None:
        """Call before what was copied may change."""
        self._check()
        self._copy.guard()

    def doubt(self) -> None:
        """Count all that is copied beside training as changed."""
        with self._lock:
            if self._changed is None:
                self._changed = [name for name, _, _ in self._versions]

    def land(self) -> list[str]:
        """Wait for the copies: names of the tensors that changed before they were safe. None of them: all is whole."""
        self._copy.wait()
        return self._check()

    def _check(self) -> list[str]:
        with self._lock:
            if self._changed is None:
                self._changed = [name for name, tensor, version in self._versions if tensor._version != version]
                self._versions.clear()
            return self._changed


def stage_for(device: torch.device) -> Stage | None:
    """What copies from this device; None for the CPU, whose tensors are copied at once."""
    return Staging() if device.type == "cuda" else None


class Staging:
    """Copies tensors device → pinned memory → target: the `Stage` of a CUDA device.

    What is copied beside training goes through a side stream; `guard` lets the device (not the host) wait for that.
    All other tensors are copied on the current stream, hence before anything may change them.
    """

    def __init__(self) -> None:
        self._side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pinned: torch.Tensor | None = None

    def takes(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cuda"

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def start(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], beside: Sequence[bool]) -> Copy:
        """See `Stage`. One copy at a time."""
        need = sum(-(-source.nbytes // _ALIGN) * _ALIGN for source, _ in pairs)
        if self._pinned is None or self._pinned.numel() < need:
            self._pinned = torch.empty(need, dtype=torch.uint8, pin_memory=True)
        current = torch.cuda.current_stream()
        self._side.wait_stream(current)
        staged = []
        at = 0
        for (source, target), aside in zip(pairs, beside, strict=True):
            view = self._pinned[at : at + source.nbytes].view(source.dtype).view(source.shape)
            with torch.cuda.stream(self._side if aside else current):
                view.copy_(source, non_blocking=True)
            staged.append((source, view, target))  # the source is held until it is copied
            at += -(-source.nbytes // _ALIGN) * _ALIGN
        return _Staged(staged, self._side.record_event(), current.record_event())


class _Staged:
    """Copies of `Staging` under way."""

    def __init__(
        self,
        staged: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        beside: torch.cuda.Event,
        in_order: torch.cuda.Event,
    ) -> None:
        self._staged, self._beside, self._in_order = staged, beside, in_order

    def guard(self) -> None:
        torch.cuda.current_stream().wait_event(self._beside)

    def wait(self) -> None:
        self._beside.synchronize()
        self._in_order.synchronize()
        for _, view, target in self._staged:
            target.copy_(view)
