"""The GPUs of this machine, as NVIDIA's management library (NVML) measures them.

Names of functions and bits: https://docs.nvidia.com/deploy/nvml-api/. A value that a GPU does not have is left out.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

from spotrun.machine.gpus import gpu_count

log = logging.getLogger(__name__)

# nvmlClocksEventReasons: https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html
REASONS = {
    0x2: "applications clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "hardware power brake",
    0x100: "display clocks",
}
IDLE = 0x1  # the GPU has nothing to do: no reason to worry


class Gpus:
    """The GPUs of this machine; none if there is no driver, no library, or no GPU."""

    def __init__(self, nvml: Any = None) -> None:
        """nvml: the module `pynvml`; None: import it once the machine has GPUs."""
        self._nvml = nvml
        self._handles: list[Any] = []
        self._warned = ""

    def _open(self) -> None:
        """Open the library, if there are GPUs. The driver may load after the agent has begun."""
        if self._nvml is None and not gpu_count():
            return
        try:
            if self._nvml is None:
                import pynvml

                self._nvml = pynvml
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        except Exception as error:  # NVML's errors share no class with Python's
            if str(error) != self._warned:
                log.warning("GPUs are not measured: %s", error)
            self._warned = str(error)

    def names(self) -> list[str]:
        """The product name of each GPU."""
        return [str(self._value(self._nvml.nvmlDeviceGetName, handle) or "GPU") for handle in self._handles]

    def read(self) -> list[dict[str, float | list[str]]]:
        """The values of each GPU, in the order of their indices.

        use: percent of the time that a kernel ran. memory, memory_total: bytes. temperature: °C. power: watts.
        sm_clock, memory_clock: MHz. ecc: uncorrected errors since the driver was loaded. throttle: see `REASONS`.
        throttle_bits: the same, as NVML has it.
        """
        if not self._handles:
            self._open()
        return [self._one(handle) for handle in self._handles]

    def _one(self, handle: Any) -> dict[str, float | list[str]]:
        nvml, found = self._nvml, dict[str, Any]()
        use = self._value(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._value(nvml.nvmlDeviceGetMemoryInfo, handle)
        power = self._value(nvml.nvmlDeviceGetPowerUsage, handle)
        found["use"] = use and use.gpu
        found["memory"], found["memory_total"] = (memory.used, memory.total) if memory else (None, None)
        found["temperature"] = self._value(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        found["power"] = power and power / 1000
        found["sm_clock"] = self._value(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
        found["memory_clock"] = self._value(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM)
        kind, counter = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        found["ecc"] = self._value(nvml.nvmlDeviceGetTotalEccErrors, handle, kind, counter)
        bits = self._value(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        if bits is not None:
            found |= {"throttle": throttling(int(bits)), "throttle_bits": int(bits)}
        return {name: value for name, value in found.items() if value is not None}

    def _value(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        """What NVML answers; None if this GPU does not have it, or is lost."""
        with contextlib.suppress(Exception):  # NVML's errors share no class with Python's
            return ask(*arguments)
        return None

    def close(self) -> None:
        """Close the library."""
        if self._handles:
            with contextlib.suppress(Exception):
                self._nvml.nvmlShutdown()
        self._handles = []


def throttling(bits: int, names: Mapping[int, str] = REASONS) -> list[str]:
    """Why the clocks are lower than they could be."""
    known = sum(names)
    found = [name for bit, name in names.items() if bits & bit]
    return found + ([f"unknown ({bits & ~known & ~IDLE:#x})"] if bits & ~known & ~IDLE else [])
