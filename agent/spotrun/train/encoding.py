"""A training state as JSON and tensors: encodes what state_dict() returns, exactly and without pickle.

JSON values stand for themselves (None, bool, int, finite float, str, list, dict with string keys). Any other value is
a dict with the key "$": {"$": "tensor", "v": name}, {"$": "tuple", "v": […]} and so on. If the values of a tensor do
not lie in the usual order (channels_last, transposed), "s" has its strides.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from spotrun.errors import MisuseError

# safetensors' names. A dtype missing here cannot be in a snapshot.
DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float64: "F64",
    torch.complex64: "C64",
}
TORCH = {name: dtype for dtype, name in DTYPES.items()}
# By name: importing them takes seconds.
_SHARDED = ("DTensor", "ShardedTensor")
_SHARDING = ("FullyShardedDataParallel", "FSDPModule", "ZeroRedundancyOptimizer")
_NOT_SHARDED = ": sharded training (FSDP, tensor parallelism, ZeRO) is not supported yet"
_INSTEAD = "Use run.ddp(…) and an optimizer that keeps its whole state"
_KINDS = "tensors, numbers, strings, bytes, None, and lists, tuples and dicts of them"


class Stateful(Protocol):
    """An object that `run.track` takes: a module, an optimizer, a scheduler: anything with these two methods."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def refuse_sharded(tracked: Mapping[str, Stateful]) -> None:
    """Raise `MisuseError` for a module or optimizer whose state_dict needs all ranks, or holds one rank's share."""
    for name, item in tracked.items():
        for part in item.modules() if isinstance(item, nn.Module) else (item,):
            if any(base.__name__ in _SHARDING for base in type(part).__mro__):
                raise MisuseError(f"{name} is or has a {type(part).__name__}{_NOT_SHARDED}. {_INSTEAD}")


class Encoder:
    """Encodes values and collects their tensors in `tensors`. A tensor met twice (tied weights) is kept once."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._seen: dict[tuple[object, ...], str] = {}

    def encode(self, value: Any, path: str) -> Any:
        """JSON for the value. Raises `MisuseError`, naming the path, for a value that a snapshot cannot hold."""
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if isinstance(value, float):  # numpy.float64 is one
            return float(value) if math.isfinite(value) else {"$": "float", "v": repr(float(value))}
        if isinstance(value, torch.Tensor):
            return self._keep("tensor", _plain(value, path), path)
        if kind is dict and "$" not in value and all(type(key) is str for key in value):
            return {key: self.encode(item, f"{path}.{key}") for key, item in value.items()}
        if kind in (dict, OrderedDict, Counter):
            return self._mapping(value, path)
        if kind is list:
            return [self.encode(item, f"{path}[{index}]") for index, item in enumerate(value)]
        if kind in (tuple, torch.Size):
            items = [self.encode(item, f"{path}[{index}]") for index, item in enumerate(value)]
            return {"$": "tuple" if kind is tuple else "size", "v": items}
        if kind is bytes:
            return {"$": "bytes", "v": base64.b64encode(value).decode()}
        if isinstance(value, (numpy.ndarray, numpy.generic)):
            return self._array(value, path)
        raise MisuseError(f"{path} is a {kind.__name__}; a snapshot can hold {_KINDS}. Leave it out of state_dict()")

    def _mapping(self, value: dict[Any, Any], path: str) -> Any:
        pairs = []
        for key, item in value.items():
            below = f"{path}.{key}" if type(key) is str else f"{path}[{key!r}]"
            pairs.append([self.encode(key, f"{path} key {key!r}"), self.encode(item, below)])
        encoded = {"$": type(value).__name__, "v": pairs}
        metadata = getattr(value, "_metadata", None)  # of Module.state_dict(): versions of each submodule's format
        if metadata is not None:
            encoded["m"] = self.encode(dict(metadata), f"{path}._metadata")
        return encoded

    def _array(self, value: Any, path: str) -> Any:
        if isinstance(value, numpy.ndarray) and type(value) not in (numpy.ndarray, numpy.memmap):
            kind = f"{type(value).__module__}.{type(value).__name__}"
            raise MisuseError(f"{path} is a {kind}; a snapshot can hold plain arrays, but no subclass of them")
        try:
            # A copy: a torch tensor can neither be read-only nor have a foreign byte order.
            tensor = torch.from_numpy(numpy.array(value, value.dtype.newbyteorder("=")))
        except TypeError:
            raise MisuseError(f"{path} is a numpy {value.dtype} array, which a snapshot cannot hold") from None
        kind = "array" if isinstance(value, numpy.ndarray) else "scalar"
        return self._keep(kind, tensor, path)

    def _keep(self, kind: str, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        found = {"$": kind, "v": self._name(tensor, path)}
        return found if tensor.is_contiguous() or not _is_dense(tensor) else {**found, "s": list(tensor.stride())}

    def _name(self, tensor: torch.Tensor, path: str) -> str:
        dense = tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
        if not dense or tensor.dtype not in DTYPES:
            what = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
            raise MisuseError(
                f"{path} is a tensor that a snapshot cannot hold ({what}); use a dense one of a usual dtype"
            )
        views = tensor.is_conj(), tensor.is_neg()  # the same memory, with other values
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), views)
        if tensor.numel() and key in self._seen:
            return self._seen[key]
        name = path
        while name in self.tensors:
            name += "'"  # {"a.b": …} beside {"a": {"b": …}}
        self.tensors[name] = tensor
        self._seen[key] = name
        return name


def _plain(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """The tensor's values. Raises `MisuseError` for a subclass, whose values may be incomplete or elsewhere."""
    if is_lazy(tensor):
        raise MisuseError(f"{path} has no values yet: call the module once, before run.track, to give it its shape")
    plain = tensor.detach()  # of a Parameter: a Tensor
    if type(plain) is torch.Tensor:
        return plain
    kind = type(plain)
    if any(base.__name__ in _SHARDED for base in kind.__mro__):
        raise MisuseError(f"{path} is a {kind.__name__}{_NOT_SHARDED}. {_INSTEAD}")
    raise MisuseError(
        f"{path} is a {kind.__module__}.{kind.__name__}; a snapshot can hold plain tensors, but no subclass of them. "
        "Return a plain tensor from state_dict(), or leave it out"
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether each value has a place of its own, and there are no gaps."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def decode(value: Any, tensor: Callable[[str], torch.Tensor], arrange: bool = True) -> Any:
    """The value that was encoded. `tensor(name)` returns a tensor; it is called once for each name.

    arrange: give each tensor the strides that it had. The fused kernels of optimizers (torch 2.13) pair values by their
    place in memory, and a sum in another order may have another last bit.
    """
    kept: dict[str, torch.Tensor] = {}

    def get(encoded: dict[str, Any]) -> torch.Tensor:
        name, strides = encoded["v"], encoded.get("s")
        if name not in kept:
            found = tensor(name)
            if arrange and strides is not None and list(found.stride()) != strides:
                found = torch.empty_strided(found.shape, strides, dtype=found.dtype, device=found.device).copy_(found)
            kept[name] = found
        return kept[name]

    return _decode(value, get)


def _decode(value: Any, get: Callable[[dict[str, Any]], torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, get) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("$")
    if kind is None:
        return {key: _decode(item, get) for key, item in value.items()}
    body = value["v"]
    if kind == "tensor":
        return get(value)
    if kind == "float":
        return float(body)
    if kind == "bytes":
        return base64.b64decode(body)
    if kind == "array":
        return get(value).numpy()
    if kind == "scalar":
        return get(value).numpy()[()]
    if kind in ("tuple", "size"):
        items = (_decode(item, get) for item in body)
        return tuple(items) if kind == "tuple" else torch.Size(items)
    pairs = [(_decode(key, get), _decode(item, get)) for key, item in body]
    if kind == "Counter":
        return Counter(dict(pairs))
    mapping: Any = OrderedDict(pairs) if kind == "OrderedDict" else dict(pairs)
    if "m" in value:
        mapping._metadata = OrderedDict(_decode(value["m"], get))
    return mapping
