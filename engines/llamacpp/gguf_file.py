"""Reads a GGUF file's metadata and checks that all its tensors are complete, before native code loads the file.

GGUF versions 2 and 3, little-endian: "GGUF", u32 version, u64 tensors, u64 entries; the entries (name, u32 type,
value); the tensor table (name, u32 dimensions, u64 each, u32 ggml type, u64 offset); then, aligned, the tensor data.
"""

import hashlib
import math
import mmap
import struct
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from messages.errors import ConfigError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_ENTRIES = 1 << 20
_MAX_ARRAY = 1 << 26
_STRING, _ARRAY = 8, 9
_ROPE_FACTORS, _F32 = "rope_freqs.weight", 0
_LAYER = "blk."
_LONG_ROPE_FACTORS = "rope_factors_long.weight"
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
# The number of values and the number of bytes in a block, keyed by ggml type id. Tensors of other types are not checked
# for size.
_TENSOR_TYPES = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 24: (1, 1),
    25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 30: (1, 2), 39: (32, 17),
}  # fmt: skip


@dataclass(frozen=True)
class GGUFFile:
    """What a GGUF file says about itself. `data_start` is where its tensor data begins, in bytes.

    `rope_factors`: the values of its tensor rope_freqs.weight; () if it has none. `long_rope`: whether it has RoPE
    factors for long contexts; llama.cpp then chooses the factors by the context that it is started with. `kind`: the
    ggml type id of most of its layers' weights, from which K and V are computed.
    """

    path: Path
    metadata: dict[str, Any]
    data_start: int
    size: int = field(compare=False)
    rope_factors: tuple[float, ...] = ()
    long_rope: bool = False
    kind: int = 0

    @property
    def architecture(self) -> str:
        """The architecture, such as "qwen3" or "llama"."""
        return str(self.metadata.get("general.architecture", ""))

    def hyperparameter(self, name: str, default: Any = None) -> Any:
        """The value of `<architecture>.<name>`."""
        return self.metadata.get(f"{self.architecture}.{name}", default)

    def tensor_digest(self) -> str:
        """SHA-256 of the tensor table's end to the file's end: reads the whole file, 1 to 2 s for each GB."""
        with self.path.open("rb") as file:
            file.seek(self.data_start)
            return hashlib.file_digest(file, "sha256").hexdigest()


def read_gguf(path: Path) -> GGUFFile:
    """The file's metadata; raises ConfigError, in one sentence, if it is missing, not GGUF, damaged or cut short."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:4] != _MAGIC:
                raise ConfigError(f"{path} is not a GGUF file (it begins with {data[:4]!r})")
            return _parse(path, data, size)
    except FileNotFoundError:
        raise ConfigError(f"there is no weights file {path}") from None
    except _DamagedFile as damage:
        raise ConfigError(f"the weights file {path} is damaged: {damage}; download or copy it again") from None
    except (OSError, ValueError) as error:  # the path is a folder, or an empty file, or one that this user can't read
        raise ConfigError(f"the weights file {path} can't be read: {error}") from None


class _DamagedFile(Exception):
    """What is wrong with a file, in words that follow "is damaged: "."""


class _GGUFReader:
    """Reads from front to back. Every length is checked against the file's size before it is used."""

    def __init__(self, data: mmap.mmap, size: int) -> None:
        self._data = data
        self._size = size
        self.position = 0

    def read_bytes(self, size: int) -> bytes:
        if size > self._size - self.position:
            raise _DamagedFile("the file ends inside its header")
        self.position += size
        return self._data[self.position - size : self.position]

    def scalar(self, form: str) -> Any:
        return struct.unpack(form, self.read_bytes(struct.calcsize(form)))[0]

    def text(self) -> str:
        return self.read_bytes(self.scalar("<Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise _DamagedFile(f"a metadata value has the unknown type {kind}")
        return self.scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if count > _MAX_ARRAY:
            raise _DamagedFile(f"a metadata array can't have {count:,} entries")
        if kind == _STRING:
            return [self.text() for _ in range(count)]
        if kind not in _SCALARS:
            raise _DamagedFile(f"an array has the unknown type {kind}")
        form = _SCALARS[kind]
        raw = self.read_bytes(count * struct.calcsize(form))
        return [number[0] for number in struct.iter_unpack(form, raw)]


def _parse(path: Path, data: mmap.mmap, size: int) -> GGUFFile:
    reader = _GGUFReader(data, size)
    reader.read_bytes(4)
    version = reader.scalar("<I")
    if version not in _VERSIONS:
        raise ConfigError(f"{path} is a GGUF file of version {version}; only versions 2 and 3 can be read")
    num_tensors, num_entries = reader.scalar("<Q"), reader.scalar("<Q")
    if num_tensors > _MAX_ENTRIES or num_entries > _MAX_ENTRIES:
        raise _DamagedFile(f"its header counts {num_tensors:,} tensors and {num_entries:,} metadata entries")
    metadata = {}
    for _ in range(num_entries):
        name = reader.text()
        metadata[name] = reader.value(reader.scalar("<I"))
    tensors = [_read_tensor(reader) for _ in range(num_tensors)]
    end = max((tensor.end for tensor in tensors), default=0)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise _DamagedFile(f"its tensors can't have an alignment of {alignment!r}")
    data_start = -(-reader.position // alignment) * alignment
    if data_start + end > size:
        raise _DamagedFile(f"{data_start + end - size:,} bytes are missing at the end of the file")
    if "general.architecture" not in metadata or not num_tensors:
        raise _DamagedFile("the file contains no model")
    factors: tuple[float, ...] = ()
    for tensor in tensors:
        if tensor.name == _ROPE_FACTORS and tensor.kind == _F32:
            reader.position = data_start + tensor.start
            factors = struct.unpack(f"<{tensor.values}f", reader.read_bytes(4 * tensor.values))
    long_rope = any(tensor.name == _LONG_ROPE_FACTORS for tensor in tensors)
    values: Counter[int] = Counter()
    for tensor in tensors:
        # The embedding is not counted. With 262,144 tokens it can be more than half of a small model, but it does not
        # affect how keys and values are rounded.
        values[tensor.kind] += tensor.values if tensor.name.startswith(_LAYER) else 0
    kind = max(values, key=values.__getitem__)
    return GGUFFile(path, metadata, data_start, size, factors, long_rope, kind)


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    """A tensor's place. `start` and `end` are counted from the start of the tensor data."""

    name: str
    kind: int
    values: int
    start: int
    end: int


def _read_tensor(reader: _GGUFReader) -> _TensorInfo:
    name, num_dimensions = reader.text(), reader.scalar("<I")
    if num_dimensions > 8:
        raise _DamagedFile(f"tensor {name!r:.60} can't have {num_dimensions:,} dimensions")
    values = math.prod(reader.scalar("<Q") for _ in range(num_dimensions))
    kind, offset = reader.scalar("<I"), reader.scalar("<Q")
    per_block, block_bytes = _TENSOR_TYPES.get(kind, (1, 0))
    return _TensorInfo(name, kind, values, offset, int(offset + -(-values // per_block) * block_bytes))
