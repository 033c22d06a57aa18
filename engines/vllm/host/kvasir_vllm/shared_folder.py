"""A folder where others may write beside it, as in /dev/shm: reached by a handle, which nobody can point elsewhere.

A path is looked up again each time it is used, and what it leads to may have been exchanged in between. No link is
followed, and nothing is opened that is not what it should be. Both ends import this module, and it nothing of ours.
"""

import os
import socket
import stat
import sys
from pathlib import Path


def open_folder(path: Path) -> int:
    """A handle. Raises OSError: it is a link, or no folder."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def open_file(folder: int, name: str, flags: int) -> int:
    """A file's descriptor; what is made belongs to the folder's owner. Raises OSError: it is a link, or no file."""
    descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # a pipe would keep us waiting
            raise FileNotFoundError(f"{name} is not a file")
        owner = os.fstat(folder)
        if flags & os.O_CREAT and owner.st_uid != os.geteuid():  # root in a container
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def bind(listener: socket.socket, folder: int, path: Path) -> None:
    """Bind a socket in the folder; only its owner may speak to it. `path`: of the socket, where there is no Linux."""
    listener.bind(f"/proc/self/fd/{folder}/{path.name}" if sys.platform == "linux" else str(path))
    os.chmod(path.name, 0o600, dir_fd=folder)


def send(sender: socket.socket, datagram: bytes, folder: int, name: str) -> None:
    """A datagram to the socket that the folder's owner has bound there. Raises OSError: there is none."""
    place = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=folder)
    try:
        found = os.fstat(place)
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.fstat(folder).st_uid:
            raise PermissionError(f"{name} is not the socket of the folder's owner")
        sender.sendto(datagram, f"/proc/self/fd/{place}")
    finally:
        os.close(place)
