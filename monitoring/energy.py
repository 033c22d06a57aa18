"""A machine's power and its GPUs' load. NVML measures them if there is an NVIDIA GPU and NVML's library.

Otherwise the declared watts are used. They count while a job is in hand: they say what the machine draws at work, and
nothing about when it is idle. Measured watts are those of all GPUs of the machine. Workers on one machine report the
same watts, so take the maximum by host, not the sum. A Mac's GPU reports nothing without root.
"""

import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Self

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

log = logging.getLogger(__name__)

SAMPLE_EVERY_S = 1.0


def _nvml() -> tuple[Any, list[Any]]:
    """Return NVML and the machine's GPUs; no GPUs without a driver or the package nvidia-ml-py."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        return nvml, [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    except Exception as error:  # noqa: BLE001  no library and no driver both mean "not measured"
        log.debug("NVML gives no figures: %s", error)
        return None, []


def nvml_watts() -> Callable[[], float] | None:
    """Return a function that reads the watts of all NVIDIA GPUs; None if there is none, or one does not report them."""
    nvml, devices = _nvml()
    try:
        _gpu_watts(nvml, devices)
    except Exception as error:  # noqa: BLE001  NVML's errors can't be named without importing it
        log.debug("NVML gives no watts: %s", error)
        return None
    return (lambda: _gpu_watts(nvml, devices)) if devices else None


def _gpu_watts(nvml: Any, devices: list[Any]) -> float:
    return sum(float(nvml.nvmlDeviceGetPowerUsage(device)) for device in devices) / 1000  # NVML reports milliwatts


class GpuCollector(Collector):
    """Collects each GPU's figures at every scrape.

    Without NVML there are none; figures that a GPU doesn't report are left out.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._nvml, self._devices = _nvml()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield busy share and memory, by host and number of the GPU."""
        labels = ("host", "gpu")
        busy = GaugeMetricFamily("kvasir_gpu_busy_ratio", "Share of a moment in which a GPU computed.", labels=labels)
        memory_in_use = GaugeMetricFamily("kvasir_gpu_memory_used_bytes", "GPU memory in use.", labels=labels)
        total = GaugeMetricFamily("kvasir_gpu_memory_total_bytes", "GPU memory.", labels=labels)
        for number, device in enumerate(self._devices):
            place = (self._host, str(number))
            with suppress(Exception):
                busy.add_metric(place, self._nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100)
            with suppress(Exception):  # a GPU without its own memory reports no memory sizes
                memory = self._nvml.nvmlDeviceGetMemoryInfo(device)
                memory_in_use.add_metric(place, memory.used)
                total.add_metric(place, memory.total)
        yield from (family for family in (busy, memory_in_use, total) if family.samples)


class PowerMeter:
    """Samples the watts once a second and adds up the energy. Use it as a context manager."""

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str,
        is_busy: Callable[[], bool],
        declared_watts: float = 0.0,
        read_watts: Callable[[], float] | None = None,
    ) -> None:
        self._read_watts = read_watts or (lambda: declared_watts if is_busy() else 0.0)
        source = "nvml" if read_watts else "declared" if declared_watts else "unknown"
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
        last_sample_at = time.monotonic()
        while not self._closed.wait(SAMPLE_EVERY_S):
            watts, now = self._read_once(), time.monotonic()
            self._watts.set(watts)
            self._energy.inc(watts * (now - last_sample_at))
            last_sample_at = now

    def _read_once(self) -> float:
        try:
            return max(0.0, self._read_watts())
        except Exception:
            log.debug("no watts this time", exc_info=True)
            return 0.0
