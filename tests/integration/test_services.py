"""The services that tests run on: they start, answer, survive what they should, and leave nothing behind."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import containers
from tests.support.servers import RabbitMQServer, RedisServer, ServerFailed
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system  # starts and kills brokers for minutes

ROOT = Path(__file__).resolve().parents[2]

HOLDER = """
import signal
from tests.support.servers import RedisServer
with RedisServer() as server:
    print(server.port, server.folder, flush=True)
    signal.pause()
"""


@pytest.fixture(scope="module")
def broker() -> Iterator[RabbitMQServer]:
    with RabbitMQServer() as server:
        yield server


def _answers(port: int) -> bool:
    with socket.socket() as connection:
        connection.settimeout(2)
        return connection.connect_ex(("127.0.0.1", port)) == 0


def test_a_broker_takes_control_commands(broker: RabbitMQServer) -> None:
    assert "kvasir" in broker.control("list_users")
    with pytest.raises(ServerFailed, match="no_such_command"):
        broker.control("no_such_command")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_services_end_with_the_process_that_started_them(how: signal.Signals) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with holder:
        assert holder.stdout is not None
        port, folder = holder.stdout.readline().split()
        assert _answers(int(port))
        holder.send_signal(how)
    wait_until(lambda: not _answers(int(port)), "the server has ended")
    wait_until(lambda: not Path(folder).exists(), "its folder is removed")


def test_a_docker_engine_that_does_not_answer_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "engine"))
        silent.listen()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/engine")
        assert not containers.available("an-image-of-no-other-test")


def test_a_server_that_cannot_start_says_what_its_log_says() -> None:
    server = RedisServer(options=["no-such-directive yes"])
    with pytest.raises(ServerFailed, match="no-such-directive"), server:
        pass
    assert not server.folder.exists()
