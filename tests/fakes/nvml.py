"""NVIDIA's management library on a machine with GPUs. Only names that the real module has are there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml


class Nvml:
    """One GPU for each dictionary: its answers by the function's name. A missing answer is an error, as of NVML."""

    def __init__(self, *gpus: dict[str, Any]) -> None:
        self.gpus = gpus

    def __getattr__(self, name: str) -> Any:
        real = getattr(pynvml, name)  # an AttributeError if NVML has no such name
        if not callable(real):
            return real

        def answer(*arguments: Any) -> Any:
            gpu = self.gpus[arguments[0]]
            if name not in gpu:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return gpu[name]

        return answer

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index


H100: dict[str, Any] = {
    "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=40),
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=60 << 30, total=80 << 30, free=20 << 30),
    "nvmlDeviceGetPowerUsage": 651_000,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetClockInfo": 1755,
    "nvmlDeviceGetTotalEccErrors": 0,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x24,
}
