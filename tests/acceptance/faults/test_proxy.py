"""The TCP proxy: what it does to a connection is what its name says."""

import socket
import threading
from collections.abc import Iterator

import pytest

from tests.acceptance.faults.proxy import TcpProxy
from tests.support.servers import HOST

PATIENCE_S = 10.0


@pytest.fixture
def echo_port() -> Iterator[int]:
    """A server that sends back what it is sent."""
    with socket.create_server((HOST, 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=echo, args=(connection,), daemon=True).start()

        def echo(connection: socket.socket) -> None:
            with connection:
                try:
                    while data := connection.recv(65536):
                        connection.sendall(data)
                except OSError:
                    return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE_S)


@pytest.fixture
def proxy(echo_port: int) -> Iterator[TcpProxy]:
    with TcpProxy(echo_port) as proxy:
        yield proxy


@pytest.fixture
def connection(proxy: TcpProxy) -> Iterator[socket.socket]:
    with socket.create_connection((HOST, proxy.port), PATIENCE_S) as connection:
        assert ask(connection, b"hello") == b"hello"
        yield connection


def ask(connection: socket.socket, data: bytes) -> bytes:
    connection.sendall(data)
    return receive(connection, len(data))


def receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        assert part, "the connection ended"
        data += part
    return data


def is_refused(proxy: TcpProxy) -> bool:
    """The reset may come while the client is still looking whether it is connected, or afterwards."""
    try:
        refused = socket.create_connection((HOST, proxy.port), PATIENCE_S)
    except ConnectionResetError:
        return True
    with refused:
        return has_ended(refused)


def is_silent(connection: socket.socket) -> bool:
    connection.settimeout(0.3)
    try:
        return not connection.recv(1)
    except TimeoutError:
        return True
    finally:
        connection.settimeout(PATIENCE_S)


def has_ended(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1)
    except ConnectionResetError:
        return True


def test_a_megabyte_comes_through_whole(proxy: TcpProxy, connection: socket.socket):
    sent = bytes(range(256)) * 4096
    threading.Thread(target=connection.sendall, args=(sent,), daemon=True).start()
    assert receive(connection, len(sent)) == sent


def test_delayed_bytes_stay_in_order_when_the_delay_ends(proxy: TcpProxy, connection: socket.socket):
    proxy.delay_s = 0.2
    connection.sendall(b"first")
    proxy.heal()
    connection.sendall(b"second")
    assert receive(connection, 11) == b"firstsecond"


def test_a_reset_is_seen_as_one(proxy: TcpProxy, connection: socket.socket):
    proxy.reset()
    with pytest.raises(ConnectionResetError):
        connection.recv(1)


def test_what_was_sent_into_a_black_hole_arrives_when_it_ends(proxy: TcpProxy, connection: socket.socket):
    proxy.freeze()
    connection.sendall(b"late")
    assert is_silent(connection)
    proxy.thaw()
    assert receive(connection, 4) == b"late"


def test_a_forgotten_connection_is_dead_without_a_word_and_a_new_one_works(proxy: TcpProxy, connection: socket.socket):
    proxy.forget()
    connection.sendall(b"lost")
    assert is_silent(connection)
    with socket.create_connection((HOST, proxy.port), PATIENCE_S) as other:
        assert ask(other, b"new") == b"new"


def test_after_a_cut_nobody_comes_through_until_it_heals(proxy: TcpProxy, connection: socket.socket):
    proxy.cut()
    assert is_refused(proxy)
    proxy.heal()
    with socket.create_connection((HOST, proxy.port), PATIENCE_S) as other:
        assert ask(other, b"new") == b"new"


def test_silenced_hosts_get_nothing_and_others_do(proxy: TcpProxy, connection: socket.socket) -> None:
    proxy.silence({"127.0.0.9"})
    assert ask(connection, b"not meant") == b"not meant"

    proxy.silence(None)
    connection.sendall(b"into the void")
    with socket.create_connection((HOST, proxy.port), PATIENCE_S) as newcomer:
        newcomer.sendall(b"into the void")
        for silent in (connection, newcomer):
            silent.settimeout(0.3)
            with pytest.raises(TimeoutError):
                silent.recv(1)

    # Then all is well for whoever comes, and those who were cut off are told
    proxy.heal()
    connection.settimeout(PATIENCE_S)
    with pytest.raises(ConnectionResetError):
        connection.recv(1)
    with socket.create_connection((HOST, proxy.port), PATIENCE_S) as newcomer:
        assert ask(newcomer, b"hello") == b"hello"
