"""State of a chosen size that never changes."""

from __future__ import annotations

from typing import Any

import torch


class Ballast:
    """For `run.track`. If the restored values differ from the saved ones, the worker ends."""

    def __init__(self, mib: int, device: torch.device) -> None:
        self.values = torch.arange(mib << 18, dtype=torch.int32, device=device)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not torch.equal(state["values"].to(self.values.device), self.values):
            raise SystemExit("the restored ballast differs from the saved one")
