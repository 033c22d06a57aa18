"""Fixtures of every test. A run that asks for no service starts none."""

import os
import signal
import sys
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

# So that `pytest` finds `tests.support` and `examples` as `python -m pytest` does.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from infra.config import next_command
from tests.support import services
from tests.support.processes import SIMULATED_MODEL, config_text
from tests.support.servers import RedisCluster

# How long an example takes says more about the machine than about the code. In CI the examples are the same each
# time: what a new one finds is found at a developer's desk, and holds up nobody else's change.
hypothesis.settings.register_profile(
    "kvasir",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
hypothesis.settings.load_profile("kvasir")

# Nor does the developer's own kvasir.toml reach a test.
os.environ["XDG_CONFIG_HOME"] = "/nowhere"

# A shell script's background jobs ignore Ctrl-C, and so would every process that a test starts in order to stop it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tests log half characters on purpose, which a report can't carry from one process to another."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "replace").decode()) for name, text in report.sections]
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why a test that was run once more failed the first time: the plug-in only names it, and CI's machine is gone."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"first try of {report.nodeid}", sep="_")
        terminalreporter.write_line(report.longreprtext[-6000:])


@pytest.fixture(autouse=True)
def _no_settings_from_outside() -> Iterator[None]:
    """The developer's own KVASIR_* settings reach no test, and what a test sets reaches no other."""
    before = {name: value for name, value in os.environ.items() if name.startswith("KVASIR_")}
    _forget_settings()
    next_command.keep(None)  # a command that a test runs in this process keeps its --config
    yield
    _forget_settings()
    os.environ.update(before)


@pytest.fixture
def configured_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present folder: empty but for the configuration of one simulated model, tiny:1b."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kvasir.toml").write_text(config_text({"tiny:1b": SIMULATED_MODEL}), "utf-8")
    return tmp_path


def _forget_settings() -> None:
    for name in list(os.environ):
        # Where vLLM lies is no setting: its tests run in the environment that there is.
        if name.startswith("KVASIR_") and not name.startswith(("KVASIR_TEST_", "KVASIR_VLLM_PYTHON")):
            del os.environ[name]


@pytest.fixture(scope="session")
def broker_url() -> Iterator[str]:
    """URL of a RabbitMQ that all tests of the run share: use `model_name`, and leave no queue of your own behind."""
    with services.broker() as url:
        yield url


@pytest.fixture(scope="session")
def store_url() -> Iterator[str]:
    """URL of a Redis that all tests of the run share: keys of one test must not be those of another."""
    with services.store() as url:
        yield url


@pytest.fixture(scope="session")
def redis_cluster_url() -> Iterator[str]:
    """URL of a Redis Cluster of three primaries, shared as `store_url` is."""
    with RedisCluster() as cluster:
        yield cluster.url


@pytest.fixture
def model_name() -> str:
    """A model that no other test has, and so queues and keys that no other test has."""
    return f"tiny-{uuid.uuid4().hex[:12]}:1b"
