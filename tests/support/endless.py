"""A server that never comes to an end: what it sends in answer to any request, again and again."""

import socket
import threading
from contextlib import suppress
from typing import Self

MOST_BYTES = 1 << 30  # after which it gives up, so that a test of what reads all of it ends


class EndlessServer:
    """On a loopback port, until the end of its `with` block. `sent`: bytes of its last answer."""

    def __init__(self, content_type: str, piece: bytes, status: int = 200, headers: str = "") -> None:
        self.sent = 0
        head = f"HTTP/1.1 {status} As you like\r\nContent-Type: {content_type}\r\nConnection: close\r\n{headers}\r\n"
        self._head, self._piece = head.encode(), piece * max(1, 65536 // len(piece))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection, suppress(OSError):
                    connection.recv(65536)
                    connection.sendall(self._head)
                    self.sent = 0
                    while self.sent < MOST_BYTES:
                        connection.sendall(self._piece)
                        self.sent += len(self._piece)
