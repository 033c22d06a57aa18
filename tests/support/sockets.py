"""Which sockets processes listen on, as the kernel tells (Linux)."""

import ipaddress
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

_LISTEN = "0A"
_ACCEPTS = 0x10000  # among the flags of a Unix socket
_DATAGRAMS = "0002"


def processes_of(folder: Path) -> set[int]:
    """Processes that were started for this folder: it is in their environment, or they work in it, as a daemon may.

    (Redis writes its title over its environment.)
    """
    text = os.fsencode(folder)
    return {pid for pid in _pids() if text in _bytes(Path(f"/proc/{pid}/environ")) + os.fsencode(_cwd(pid))}


def listening(pids: Collection[int]) -> set[tuple[str, int]]:
    """(address, port) of each socket on which one of these processes listens."""
    inodes = {target for pid in pids for target in _links(Path(f"/proc/{pid}/fd"))}
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in inodes:
                host, port = fields[1].split(":")
                ports.add((_address(host), int(port, 16)))
    return ports


def named(pids: Collection[int]) -> set[str]:
    """The path of each Unix socket on which one of these processes listens, or takes datagrams; "@…": it has none."""
    inodes = {target for pid in pids for target in _links(Path(f"/proc/{pid}/fd"))}
    rows = [line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {
        row[7]
        for row in rows
        if len(row) == 8 and f"socket:[{row[6]}]" in inodes and (int(row[3], 16) & _ACCEPTS or row[4] == _DATAGRAMS)
    }


def _address(text: str) -> str:
    """The kernel prints addresses as words of four bytes in the machine's order."""
    words = [bytes.fromhex(text[start : start + 8]) for start in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)))


def _pids() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())


def _cwd(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return ""


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended, or is somebody else's
        return b""


def _links(folder: Path) -> Iterator[str]:
    try:
        for path in folder.iterdir():
            yield os.readlink(path)
    except OSError:
        return
