"""A name server of a test's own, that can be slow or silent, and what makes a program ask it."""

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

_END_OF_TEST = b""


class NameServer:
    """Answers each question for an IPv4 address with the same one, and others with nothing (RFC 1035, 4.1). Linux."""

    def __init__(self, answer: str) -> None:
        self.delay_s = 0.0  # before each answer
        self.is_silent = False
        # Each process has one of its own: clients can name no other port than 53.
        self.address = f"127.77.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
        self._answer = answer
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._thread = threading.Thread(target=self._serve, name="name server", daemon=True)

    def __enter__(self) -> Self:
        self._socket.bind((self.address, 53))
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as goodbye:
            goodbye.sendto(_END_OF_TEST, (self.address, 53))
        self._thread.join(5)
        self._socket.close()

    def _serve(self) -> None:
        while (query := self._socket.recvfrom(512))[0] != _END_OF_TEST:
            if not self.is_silent:
                timer = threading.Timer(self.delay_s, self._reply, query)
                timer.daemon = True
                timer.start()

    def _reply(self, packet: bytes, client: tuple[str, int]) -> None:
        end = packet.index(b"\0", 12) + 5
        is_ipv4 = packet[end - 4 : end] == b"\0\1\0\1"
        header = packet[:2] + b"\x81\x80" + struct.pack(">4H", 1, int(is_ipv4), 0, 0)
        answer = b"\xc0\x0c\0\1\0\1" + struct.pack(">IH", 60, 4) + socket.inet_aton(self._answer)
        with contextlib.suppress(OSError):  # the test is over
            self._socket.sendto(header + packet[12:end] + (answer if is_ipv4 else b""), client)


def asking(addresses: Sequence[str], folder: Path) -> tuple[str, ...]:
    """What comes before a command so that it asks these name servers, by preference. Root, and unshare of util-linux.

    The process keeps its id.
    """
    path = folder / "resolv.conf"
    path.write_text("".join(f"nameserver {address}\n" for address in addresses))
    return "unshare", "--mount", "sh", "-c", f'mount --bind {path} /etc/resolv.conf && exec "$@"', "sh"
