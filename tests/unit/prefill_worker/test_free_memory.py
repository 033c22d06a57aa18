"""A prompt that would leave too little of the machine's memory free goes to another worker, if there is one."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infra.quick_jobs import QuickJobs
from infra.worker_loop import OneByOne
from messages.workers import SELF_PAUSED
from prefill_worker import free_memory
from prefill_worker.admission import NoCapacity
from prefill_worker.free_memory import FreeMemory, available_bytes, bytes_of_vm_stat
from tests.support.pipeline import Pipeline, SupervisedWorker
from tests.support.waiting import wait_until

GB = 10**9

# macOS's vm_stat(1), as its source prints it: apple-oss-distributions/system_cmds, vm_stat/vm_stat.c, `snapshot`.
# psutil, too, takes free (with speculative) and inactive pages for available: giampaolo/psutil, psutil/_psosx.py.
VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10000.
Pages active:                            400000.
Pages inactive:                           20000.
Pages speculative:                         3000.
Pages throttled:                              0.
Pages wired down:                        150000.
Pages purgeable:                            700.
"Translation faults":                 123456789.
"""


def test_what_is_under_way_counts_until_it_ends() -> None:
    memory = FreeMemory(2 * GB, lambda: True, lambda: 10 * GB)
    with memory.reserve(5 * GB):
        with (
            pytest.raises(NoCapacity, match=r"a KV cache of 4\.00 GB would leave less than 2 GB"),
            memory.reserve(4 * GB),
        ):
            pass
        memory.look_again()
        assert memory.why_short()
    memory.look_again()
    assert memory.why_short() == ""
    with memory.reserve(8 * GB):
        pass
    with pytest.raises(NoCapacity), memory.reserve(8 * GB + 1):
        pass


def test_nobody_looks_without_the_setting() -> None:
    def never() -> Any:
        raise AssertionError

    with FreeMemory(0, never, never).reserve(1 << 60):
        pass


def test_the_only_worker_does_it_all_the_same_and_one_that_paused_goes_on_when_it_is_left_alone() -> None:
    others = [True]
    memory = FreeMemory(GB, lambda: others[0], lambda: 0)
    with pytest.raises(NoCapacity), memory.reserve(1):
        pass
    others[0] = False
    memory.look_again()
    assert memory.why_short() == ""
    with memory.reserve(1):
        assert memory.why_short() == ""


@pytest.fixture(params=[OneByOne, QuickJobs])
def pipeline(request: pytest.FixtureRequest) -> Iterator[Pipeline]:
    with Pipeline(steps=request.param) as pipeline:
        yield pipeline


def register_another(pipeline: Pipeline, worker: SupervisedWorker, off: str) -> None:
    """A prefill worker of the same model, elsewhere."""
    registration = replace(worker.worker.registration(), worker_id="another", off=off)
    pipeline.cluster_state.register(registration, ttl_s=600)


def test_a_worker_whose_machine_is_full_leaves_its_jobs_in_the_queue_and_comes_back(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    available = [0]
    monkeypatch.setattr(free_memory, "available_bytes", lambda: available[0])
    prefill = pipeline.start_prefill(free_bytes=GB)
    pipeline.start_decode()
    # The only one works on, full or not
    assert pipeline.run(pipeline.job("alone")).decode.kv_transfer == "verified"
    # Given another: then this one takes no more, and loses nothing
    register_another(pipeline, prefill, off="")
    job = pipeline.job("beside another")
    pipeline.submit(job)
    wait_until(lambda: prefill.worker.registration().off == SELF_PAUSED, "it has paused itself")
    assert "would leave less than 1 GB of this machine's memory" in prefill.worker.registration().details.paused_because
    assert pipeline.results_so_far(job) == []
    # When memory is free again
    available[0] = 2 * GB
    result = pipeline.result(job)
    assert (result.state, result.attempts, result.decode.kv_transfer) == ("succeeded", 1, "verified")
    wait_until(lambda: prefill.worker.registration().off == "", "it takes jobs")


def test_a_worker_whose_machine_is_full_goes_on_where_the_others_have_paused(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(free_memory, "available_bytes", lambda: 0)
    prefill = pipeline.start_prefill(free_bytes=GB)
    pipeline.start_decode()
    register_another(pipeline, prefill, off=SELF_PAUSED)
    assert pipeline.run(pipeline.job()).decode.kv_transfer == "verified"


def test_the_system_says_what_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Linux: proc_meminfo(5), kB of 1,024 bytes
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       65842148 kB\nMemFree:         1042148 kB\nMemAvailable:   31004872 kB\n")
    monkeypatch.setattr(free_memory, "_MEMINFO", meminfo)
    assert available_bytes() == 31004872 * 1024
    meminfo.write_text("MemTotal:       65842148 kB\n")  # a kernel before 3.14
    assert available_bytes() == math.inf
    # macOS
    monkeypatch.setattr(free_memory, "_MEMINFO", tmp_path / "none")
    monkeypatch.setattr(free_memory.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=VM_STAT))
    assert available_bytes() == 16384 * (10000 + 20000 + 3000)
    assert bytes_of_vm_stat("usage: vm_stat [[-c count] interval]\n") == math.inf

    def not_there(*_: object, **__: object) -> None:
        raise FileNotFoundError("vm_stat")

    monkeypatch.setattr(free_memory.subprocess, "run", not_there)
    assert available_bytes() == math.inf
