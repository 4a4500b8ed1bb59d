"""What a newcomer does before others wait for it, so that its first step is not slow.

cuBLAS and cuDNN make a handle for each thread that uses them, and CUDA loads a kernel before its first use. So the
first step with a model of 25 M parameters took 0.38 s on an H200, and the next ones took 0.01 s (torch 2.11). It took
0.03 s if the optimizer's state had been made before, and a small model had been trained for a step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from spotrun.train import optimizer_state, transfer

log = logging.getLogger(__name__)

HALVES = (torch.bfloat16, torch.float16)  # a script may use them without a parameter of that type (autocast)


def prepare(
    device: torch.device, models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> list[torch.optim.Optimizer]:
    """Make a first step faster. Returns the optimizers whose state is new: see `optimizer_state.allocate`."""
    if device.type == "cuda":
        transfer.reserve()
        compute(device, models)
    made = [each for each in optimizers if optimizer_state.allocate(each)]
    if device.type == "cuda":
        torch.cuda.empty_cache()  # gives back unused memory: NCCL needs some for the next group
    return made


def compute(device: torch.device, models: Iterable[nn.Module]) -> None:
    """Compute on a GPU, with a few numbers, what such models usually compute. Nothing of the script changes."""
    modules = [module for model in models for module in model.modules()]
    types = {each.dtype for module in modules for each in module.parameters(recurse=False)} | {*HALVES}
    convolves = any(isinstance(module, _ConvNd) for module in modules)
    for dtype in sorted((each for each in types if each.is_floating_point), key=str):
        try:
            _compute(device, dtype, convolves)
        except Exception as error:  # the first step then takes longer
            log.info("no computation with %s before the first step: %s", dtype, error)


def _compute(device: torch.device, dtype: torch.dtype, convolves: bool) -> None:
    """Gradients of two layers, and of a convolution."""
    with torch.enable_grad():
        first, second, image = (torch.ones(64, 64, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
        bias = torch.ones(64, dtype=dtype, device=device, requires_grad=True)
        found = functional.linear(functional.relu(functional.linear(first, second, bias)), second, bias)
        if convolves:
            kernel = second[:3, :3].reshape(1, 1, 3, 3)
            found = found + functional.conv2d(image.view(1, 1, 64, 64), kernel, padding=1)[0, 0]
        loss = functional.cross_entropy(found.float(), torch.zeros(64, dtype=torch.int64, device=device))
        torch.autograd.grad(loss, [first, second, bias, image], allow_unused=True)
