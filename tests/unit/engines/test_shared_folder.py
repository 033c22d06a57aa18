"""What vLLM's connector does in a folder that a request names, when another user exchanges what is in it."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.vllm.host.kvasir_vllm.shared_folder import bind, open_file, open_folder, send

MADE = os.O_WRONLY | os.O_CREAT | os.O_EXCL


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "ours").mkdir()
    handle = open_folder(tmp_path / "ours")
    yield handle
    os.close(handle)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[socket.socket]:
    """A socket that nobody means to speak to."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(tmp_path / "other"))
        other.setblocking(False)
        yield other


def test_a_datagram_reaches_the_socket_of_the_folder_wherever_that_was_moved(tmp_path: Path, folder: int) -> None:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
    ):
        (tmp_path / "ours").rename(tmp_path / "moved")
        (tmp_path / "theirs").mkdir()
        (tmp_path / "ours").symlink_to(tmp_path / "theirs")
        bind(listener, folder, tmp_path / "ours" / "events.sock")
        send(sender, b"done", folder, "events.sock")
        assert listener.recv(10) == b"done"
    assert (tmp_path / "moved" / "events.sock").stat().st_mode & 0o777 == 0o600
    assert list((tmp_path / "theirs").iterdir()) == []


def test_a_link_in_the_place_of_a_socket_is_not_spoken_to(tmp_path: Path, folder: int, other: socket.socket) -> None:
    (tmp_path / "ours" / "events.sock").symlink_to(tmp_path / "other")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, pytest.raises(OSError, match="is not a socket"):
        send(sender, b"done", folder, "events.sock")
    with pytest.raises(BlockingIOError):
        other.recv(10)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_socket_of_somebody_else_in_the_folder_is_not_spoken_to(
    tmp_path: Path, folder: int, other: socket.socket
) -> None:
    os.link(tmp_path / "other", tmp_path / "ours" / "events.sock")
    os.chown(tmp_path / "ours", 4711, 4711)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, pytest.raises(PermissionError):
        send(sender, b"done", folder, "events.sock")
    assert os.fstat(open_file(folder, "a.kv", MADE)).st_uid == 4711


def test_no_link_and_no_pipe_is_opened_and_no_link_to_a_folder(tmp_path: Path, folder: int) -> None:
    (tmp_path / "secret").write_bytes(b"theirs")
    (tmp_path / "ours" / "link.kv").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "ours" / "pipe.kv")
    for name, flags in (("link.kv", os.O_RDONLY), ("link.kv", os.O_WRONLY), ("pipe.kv", os.O_RDONLY)):
        with pytest.raises(OSError, match=r"link\.kv|pipe\.kv is not a file"):
            open_file(folder, name, flags)
    with pytest.raises(FileExistsError):
        open_file(folder, "link.kv", MADE)
    (tmp_path / "linked").symlink_to(tmp_path / "ours")
    with pytest.raises(NotADirectoryError):
        open_folder(tmp_path / "linked")
