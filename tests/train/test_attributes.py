"""`Attributes`: what a script keeps is put back after a validation that does not count."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from torch import nn

from spotrun.train import attributes
from spotrun.train.attributes import Attributes


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.results: list[Any] = [[], [1]]
        self.by_name: dict[str, Any] = defaultdict(list, a=[1])
        self.counts, self.seen, self.last = Counter(x=2), {1}, deque([1, 2], maxlen=2)
        self.total, self.number, self.text = torch.zeros(3), 0, "before"
        self.metric = torchmetrics.MeanMetric()
        self.metrics = {"own": torchmetrics.SumMetric()}
        self.results.append(self.results)  # a list may have itself

    def change(self) -> None:
        """As validation steps do."""
        with torch.inference_mode():
            self.results[0].append(torch.ones(()))
            self.results.append([])
            self.by_name["b"].append(2)
            self.by_name["a"].clear()
            self.counts["x"] += 1
            self.seen.add(2)
            self.last.append(3)
            self.total += 1
            self.number, self.text = 7, "after"
            vars(self)["new"] = 1
            self.metric(1.0)
            self.metrics["own"](2.0)
            self.norm(torch.randn(4, 2))


def content(holder: Holder) -> str:
    own = {name: value for name, value in vars(holder).items() if not name.startswith("_")}
    states = [vars(each)["_update_count"] for each in (holder.metric, holder.metrics["own"])]
    return f"{own} {states} {holder.metric.mean_value} {holder.metrics['own'].sum_value} {list(holder.buffers())}"


@pytest.mark.parametrize("reset", [False, True])
def test_everything_is_put_back(reset: bool) -> None:
    """Also in tensors that were made in inference mode, as torchmetrics makes them after the first validation."""
    holder = Holder()
    if reset:
        holder.change()
        with torch.inference_mode():
            holder.metric.reset()
            holder.total = torch.zeros(3)
    before, results, version = content(holder), holder.results, holder.layer.weight._version
    kept = Attributes([holder])
    holder.change()
    assert content(holder) != before
    kept.put_back()
    assert content(holder) == before
    assert holder.results is results
    assert hasattr(holder, "new") == reset
    assert holder.layer.weight._version == version  # the parameters are in the state that spotrun keeps


def test_a_callback_is_put_back() -> None:
    class Callback:
        found: list[int]

        def __init__(self) -> None:
            self.found, self.other = [], object()

    callback = Callback()
    kept, other = Attributes([callback]), callback.other
    callback.found, callback.more = [1], 2  # type: ignore[attr-defined]
    kept.put_back()
    assert vars(callback) == {"found": [], "other": other}


def test_what_cannot_be_put_back() -> None:
    """Then all workers start again."""
    holder = Holder()
    with patch.object(attributes, "MOST", 0):
        kept = Attributes([holder])
        kept.put_back()
        holder.change()
        with pytest.raises(dist.DistError, match="a tensor has changed"):
            kept.put_back()


def test_an_attribute_that_cannot_be_read() -> None:
    """The validation goes on. Only an interruption then has all workers start again."""

    class Broken(dict[str, int]):
        def items(self) -> Any:
            raise OSError("no disk")

    holder = Holder()
    vars(holder)["broken"] = Broken()
    kept = Attributes([holder])
    with pytest.raises(dist.DistError, match="no disk"):
        kept.put_back()
