"""A folder beside which others may write, as in /dev/shm. It is reached by a handle, which nobody can redirect.

A path is looked up again each time it is used, and what it leads to may have been exchanged in between. No link is
followed, and nothing is opened that is not what it should be. Both ends import this module, and it nothing of ours.
"""

import os
import socket
import stat
import sys
from pathlib import Path


def open_folder(path: Path) -> int:
    """A handle of the folder. Raises OSError if it is a link, or not a folder."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def open_file(folder: int, name: str, flags: int) -> int:
    """A file's descriptor. A new file gets the folder's owner. Raises OSError if it is a link, or not an ordinary
    file."""
    descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # a pipe is refused, because it could block
            raise FileNotFoundError(f"{name} is not a file")
        owner = os.fstat(folder)
        if flags & os.O_CREAT and owner.st_uid != os.geteuid():  # as root in a container, give it to the folder's owner
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def bind(listener: socket.socket, folder: int, path: Path) -> None:
    """Bind a socket in the folder, to which only its owner may send. `path` is the socket's path, for systems other
    than Linux."""
    listener.bind(f"/proc/self/fd/{folder}/{path.name}" if sys.platform == "linux" else str(path))
    os.chmod(path.name, 0o600, dir_fd=folder)


def send(sender: socket.socket, datagram: bytes, folder: int, name: str) -> None:
    """Send a datagram to the socket that the folder's owner has bound there. Raises OSError if there is none."""
    place = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=folder)
    try:
        found = os.fstat(place)
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.fstat(folder).st_uid:
            raise PermissionError(f"{name} is not a socket, or does not belong to the folder's owner")
        sender.sendto(datagram, f"/proc/self/fd/{place}")
    finally:
        os.close(place)
