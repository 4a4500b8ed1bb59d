"""Copying a CUDA state to the host without holding up training: pinned memory and a side stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

_ALIGN = 64


class Staging:
    """Copies tensors device → pinned memory → target.

    Tensors that only the optimizer changes are copied on a side stream, beside the next step's forward and backward;
    `guard`, called before the optimizer steps, lets the device (not the host) wait for that. All others are copied on
    the current stream, hence before anything may change them.
    """

    def __init__(self) -> None:
        self._side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pinned: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def start(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], optimized: set[int]) -> Callable[[], None]:
        """Begin to copy (source, target) pairs; `optimized`: data pointers of what only the optimizer changes.

        The result, called from another thread, waits for the device and fills the targets. One copy at a time.
        """
        need = sum(-(-source.nbytes // _ALIGN) * _ALIGN for source, _ in pairs)
        if self._pinned is None or self._pinned.numel() < need:
            self._pinned = torch.empty(need, dtype=torch.uint8, pin_memory=True)
        current = torch.cuda.current_stream()
        self._side.wait_stream(current)
        staged = []
        at = 0
        for source, target in pairs:
            view = self._pinned[at : at + source.nbytes].view(source.dtype).view(source.shape)
            with torch.cuda.stream(self._side if source.data_ptr() in optimized else current):
                view.copy_(source, non_blocking=True)
            staged.append((source, view, target))  # the source is held until it is copied
            at += -(-source.nbytes // _ALIGN) * _ALIGN
        self._copied = self._side.record_event()
        events = (self._copied, current.record_event())

        def finish() -> None:
            for event in events:
                event.synchronize()
            for _, view, target in staged:
                target.copy_(view)

        return finish

    def guard(self) -> None:
        """Let the current stream wait for the copies of `start`."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
