"""What a machine draws: measured by NVML where there is an NVIDIA GPU and its library, else what was declared.

Declared watts count while a job is in hand; they say what the machine draws at work, and nothing of its idling.
Measured ones are those of all GPUs of the machine. Workers on one machine report the same watts: take the maximum
by host, not the sum.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Self

from prometheus_client import CollectorRegistry, Counter, Gauge

log = logging.getLogger(__name__)

SAMPLE_EVERY_S = 1.0


def nvml_watts() -> Callable[[], float] | None:
    """Reads the watts of all NVIDIA GPUs, or None without one or without the package nvidia-ml-py."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        devices = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
        _gpu_watts(nvml, devices)
    except Exception as error:  # noqa: BLE001  no library, no driver, a GPU that does not tell: all mean "not measured"
        log.debug("NVML gives no watts: %s", error)
        return None
    return (lambda: _gpu_watts(nvml, devices)) if devices else None


def _gpu_watts(nvml: Any, devices: list[Any]) -> float:
    return sum(float(nvml.nvmlDeviceGetPowerUsage(device)) for device in devices) / 1000  # told in milliwatts


class PowerMeter:
    """Samples the watts once a second and adds the energy up. Use as a context manager."""

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str,
        is_busy: Callable[[], bool],
        declared_watts: float = 0.0,
        measured: Callable[[], float] | None = None,
    ) -> None:
        self._read = measured or (lambda: declared_watts if is_busy() else 0.0)
        source = "nvml" if measured else "declared" if declared_watts else "unknown"
        watts = Gauge("kvasir_power_watts", "What the machine draws now.", ("host", "source"), registry=registry)
        energy = Counter("kvasir_energy_joules", "Energy since the start.", ("host", "source"), registry=registry)
        self._watts, self._energy = watts.labels(host, source), energy.labels(host, source)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="power meter", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._closed.set()
        self._thread.join()

    def _sample(self) -> None:
        before = time.monotonic()
        while not self._closed.wait(SAMPLE_EVERY_S):
            watts, now = self._read_once(), time.monotonic()
            self._watts.set(watts)
            self._energy.inc(watts * (now - before))
            before = now

    def _read_once(self) -> float:
        try:
            return max(0.0, self._read())
        except Exception:
            log.debug("no watts this time", exc_info=True)
            return 0.0
