"""A newcomer's first computations change nothing that the script can see."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spotrun.train import first_use

CPU = torch.device("cpu")


def test_they_change_nothing_of_the_script() -> None:
    before = torch.get_rng_state()
    with torch.no_grad():
        first_use._compute(CPU, torch.float32, convolves=True)
        assert not torch.is_grad_enabled()
    assert torch.get_rng_state().equal(before)


def test_without_a_gpu_only_the_optimizers_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_use, "compute", None)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert first_use.prepare(CPU, [model], [optimizer]) == [optimizer]
    assert optimizer.state


def test_each_type_is_computed_and_none_has_to_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error here shows up in the script's own step, if it matters."""
    tried = []

    def fail(device: torch.device, dtype: torch.dtype, convolves: bool) -> None:
        tried.append((dtype, convolves))
        raise RuntimeError("not here")

    monkeypatch.setattr(first_use, "_compute", fail)
    model = nn.Sequential(nn.Conv2d(1, 1, 3), nn.Linear(2, 2, dtype=torch.float64), nn.Embedding(2, 2))
    first_use.compute(torch.device("cuda"), [model])
    types = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
    assert tried == [(dtype, True) for dtype in types]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cuda_computes_each_type(dtype: torch.dtype) -> None:
    before = torch.cuda.get_rng_state()
    first_use._compute(torch.device("cuda"), dtype, convolves=True)
    assert first_use.prepare(torch.device("cuda"), [nn.Linear(2, 2)], []) == []
    torch.cuda.synchronize()
    assert torch.cuda.get_rng_state().equal(before)
