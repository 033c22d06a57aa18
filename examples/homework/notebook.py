"""A few words to write notebooks with: cells, outputs, and the file that holds them."""

import json
import struct
import zlib
from base64 import b64encode
from typing import Any

Cell = dict[str, Any]
Output = dict[str, Any]

R = {
    "kernelspec": {"display_name": "R", "language": "R", "name": "ir"},
    "language_info": {"file_extension": ".r", "mimetype": "text/x-r-source", "name": "R", "version": "4.3.2"},
}
PYTHON = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python", "version": "3.11.7"},
}


def text(source: str) -> Cell:
    return {"cell_type": "markdown", "metadata": {}, "source": _lines(source)}


def code(source: str, *outputs: Output, run: bool = True) -> Cell:
    """A code cell; `run=False` for one that was never run. Execution counts are given by `notebook`."""
    return {
        "cell_type": "code",
        "execution_count": 0 if run else None,
        "metadata": {},
        "outputs": list(outputs),
        "source": _lines(source),
    }


def printed(content: str, stream: str = "stdout") -> Output:
    return {"name": stream, "output_type": "stream", "text": _lines(content, strip=False)}


def shown(content: str) -> Output:
    return {"data": {"text/plain": _lines(content)}, "metadata": {}, "output_type": "display_data"}


def plotted(rows: list[str]) -> Output:
    """A picture given as rows of characters, one for each pixel: '#' is dark."""
    picture = b64encode(png(rows)).decode()
    data = {"image/png": picture + "\n", "text/plain": ["plot without title"]}
    return {"data": data, "metadata": {}, "output_type": "display_data"}


def failed(name: str, message: str, *traceback: str) -> Output:
    return {"ename": name, "evalue": message, "output_type": "error", "traceback": [message, *traceback]}


def notebook(metadata: dict[str, Any], *cells: Cell) -> str:
    """The file's text, in nbformat 4.4."""
    count = 0
    for cell in cells:
        if cell.get("execution_count") is not None:
            count += 1
            cell["execution_count"] = count
    return (
        json.dumps(
            {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 4}, indent=1, ensure_ascii=False
        )
        + "\n"
    )


def png(rows: list[str]) -> bytes:
    """An 8-bit grey PNG. Stored, not compressed, so that every zlib gives the same bytes."""
    width, height = len(rows[0]), len(rows)
    pixels = b"".join(b"\0" + bytes(0 if mark == "#" else 255 for mark in row) for row in rows)
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(pixels, 0)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _lines(content: str, strip: bool = True) -> list[str]:
    return (content.strip("\n") if strip else content).splitlines(keepends=True)
