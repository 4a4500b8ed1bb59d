"""What workers compare before they train together."""

from __future__ import annotations

import pytest
import torch

from spotrun.train.agreement import fingerprint

VALUES = (
    torch.randn(3, 5),
    torch.randn(7, dtype=torch.bfloat16),
    torch.tensor(2.5),
    torch.tensor([True, False, True]),
    torch.empty(0),
    torch.randn(4, 6).t(),
    torch.randn(11)[1:],  # its memory begins at an odd place
    torch.arange(9, dtype=torch.uint8)[1:],
)


@pytest.mark.parametrize("values", VALUES, ids=lambda each: f"{each.dtype}-{tuple(each.shape)}")
def test_a_fingerprint_follows_from_the_values(values: torch.Tensor) -> None:
    others = [torch.ones(3), values.clone()]
    assert fingerprint([torch.ones(3), values]) == fingerprint(others)
    for index in range(values.numel()):
        changed = values.clone().reshape(-1)
        changed[index] = not changed[index] if values.dtype == torch.bool else changed[index] + 1
        assert fingerprint([torch.ones(3), changed]) != fingerprint(others)


def test_a_fingerprint_follows_from_the_order_of_the_tensors() -> None:
    assert fingerprint([torch.ones(2), torch.zeros(2)]) != fingerprint([torch.zeros(2), torch.ones(2)])


def test_what_cannot_be_read_is_not_equal() -> None:
    for each in (torch.eye(3).to_sparse(), torch.ones(2, device="meta")):
        assert fingerprint([each]) != fingerprint([each])
