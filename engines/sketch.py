"""Sketches: what an engine computes from a fixed prompt, made small, so that two engines can be compared.

For each layer, a sketch has K and V at 16 positions of a prompt of min(2,048, context) ids, without the last one. Each
vector is projected onto 16 random directions of signs, and its norm is added. Such a projection changes distances by
about 1/sqrt(2 * 16) = 18 % (Achlioptas, Database-friendly random projections, JCSS 66, 2003). Two engines agree if the
differences are no larger than rounding makes them.

Measured, as a share of the norm, the third largest of 16 positions, in the first layer and the largest of the others
(four tiny random models, the demo model, and SmolLM2-135M with its 30 layers; each against float32):

    float32 in MLX and PyTorch                0.000004, 0.000005
    float16 weights, or a float16 cache       0.0010, 0.0034
    bfloat16 weights, or computed in it       0.0083, 0.027
    Q8_0, or 8-bit activations                0.024, 0.062
    Q4_0 and Q4_1                             0.19, 0.64

The tolerances are twice these figures, and more for float32, because no deep model was measured in it (`TOLERANCES`).
Of the two engines, the one with the coarser rounding decides which tolerance applies. GPUs were not measured.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from engines.rope import Rope, difference
from messages import checks
from messages.errors import KvasirError, KVTransferFailed
from messages.kv import Array, KVLayout

TOKENS = 2048
POSITIONS = 16
WIDTH = 16
VERSION = 1  # sketches of different versions are never compared
_MAX_BYTES = 4 << 20  # a sketch of 1,024 layers has 2.2 MiB

# The tolerances for the first layer and for later layers, keyed by rounding, from fine to coarse.
TOLERANCES = {
    "f32": (1e-4, 1e-3),
    "f16": (2e-3, 7e-3),
    "bf16": (1.7e-2, 5.5e-2),
    "q8": (5e-2, 0.13),
    "q4": (0.4, 1.3),
}
_ROUNDINGS = tuple(TOLERANCES)
# One position out of this many is allowed to exceed the tolerance. In a mixture of experts, rounding can change which
# of two nearly tied experts is chosen.
_POSITIONS_PER_OUTLIER = 8


@dataclass(frozen=True, eq=False)
class Sketch:
    """A sketch: what one engine computed from one set of weights.

    `numbers` are float32 of the shape `numbers_shape(layout)`, (rows, K and V, POSITIONS, WIDTH + 1): the projection,
    then the norm. Positions that a short prompt or window doesn't have are zeros. Each layer has a row, and after them
    each recurrent state. A state's row has only the last position, with the convolution's columns in K's place and the
    matrix in V's.
    """

    engine: str
    rounding: str  # precision of the weights; a key of TOLERANCES
    weights: str  # fingerprint of the weight files that the engine loaded
    tokenizer: str
    tokens: int  # length of the prompt whose KV cache was sketched
    layout: KVLayout
    ropes: tuple[Rope, ...]
    numbers: Array = field(repr=False)

    @cached_property
    def body(self) -> bytes:
        """One line of JSON and the numbers: equal sketches have equal bytes."""
        fields = {name: getattr(self, name) for name in ("engine", "rounding", "weights", "tokenizer", "tokens")}
        fields |= {"v": VERSION, "layout": asdict(self.layout), "ropes": [asdict(rope) for rope in self.ropes]}
        header = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        return header + b"\n" + np.ascontiguousarray(self.numbers, "<f4").tobytes()

    @cached_property
    def name(self) -> str:
        """32 hex digits, the hash of its bytes. The sketch is stored under it, and stored KV names its producer by
        it."""
        return sketch_name(self.body)


@dataclass(frozen=True, slots=True)
class SketchAgreement:
    """The comparison of two sketches: why KV caches can't be exchanged ("" if they can), and the difference by layer.

    `formats_differ`: dtypes or formats of weights differ. `layers`: of K and of V, as a share of their norms, and what
    is taken for rounding.
    """

    problem: str
    formats_differ: bool = False
    layers: tuple[tuple[float, float, float], ...] = ()


def read_sketch(body: bytes, name: str) -> Sketch:
    """The sketch of that name. Raises KVTransferFailed, whatever else the bytes are."""
    if len(body) > _MAX_BYTES or sketch_name(body) != name:
        raise KVTransferFailed(f"the store holds another sketch under the name {name:.12}")
    header, _, rest = body.partition(b"\n")
    try:
        fields = json.loads(header)
        if fields.pop("v") != VERSION or fields["rounding"] not in TOLERANCES:
            raise KVTransferFailed(f"sketch {name:.12} has a version that this program does not read")
        layout_fields = fields["layout"]
        tuples = {key: tuple(value) for key, value in layout_fields.items() if isinstance(value, list)}
        fields["layout"] = layout = KVLayout(**layout_fields | tuples)
        ropes = ((rope["frequencies"], rope["scale"], rope["base"]) for rope in fields["ropes"])
        fields["ropes"] = tuple(
            Rope(tuple(map(float, turns)), float(scale), float(base)) for turns, scale, base in ropes
        )
        checks.whole("tokens", fields["tokens"], 1, TOKENS)
        for name_of in ("engine", "weights", "tokenizer"):
            checks.text(name_of, fields[name_of], 255)
        sketch = Sketch(**fields, numbers=np.frombuffer(rest, "<f4").reshape(numbers_shape(layout)))
        if not np.isfinite(sketch.numbers).all():
            raise KVTransferFailed(f"sketch {name:.12} holds inf or nan")
    except KVTransferFailed:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, KvasirError) as error:
        raise KVTransferFailed(f"sketch {name:.12} can't be read: {error!r:.80}") from None
    return sketch


def prompt_ids(vocabulary: int, tokens: int) -> tuple[int, ...]:
    """The prompt for every engine with this vocabulary size. A shorter prompt is a prefix of a longer one.

    Nearly every vocabulary has its control tokens at either end, so the first and the last eighth are left out.
    """
    margin = vocabulary // 8
    numbers = np.frombuffer(random_bytes(f"ids/{vocabulary}", 4 * TOKENS), "<u4")[:tokens]
    return tuple((margin + numbers % (vocabulary - 2 * margin)).tolist())


def numbers_shape(layout: KVLayout) -> tuple[int, int, int, int]:
    """The shape of a sketch's numbers."""
    return (layout.num_layers + len(layout.state_layers), 2, POSITIONS, WIDTH + 1)


def positions(layout: KVLayout, layer: int, tokens: int) -> list[int]:
    """The positions at which a layer is sampled: 9k² and the last one; with a window, evenly over the rows that are
    kept.

    A recurrent state, whose rows follow those of the layers, is looked at after the last position.
    """
    if layer >= layout.num_layers:
        return [tokens - 1]
    if layer in layout.window_layers:
        rows = min(layout.window - 1, tokens)
        return sorted({int(place) for place in np.linspace(tokens - rows, tokens - 1, min(rows, POSITIONS)).round()})
    return sorted({*(place for k in range(POSITIONS - 1) if (place := 9 * k * k) < tokens), tokens - 1})


def project(layer: int, kv_vectors: Array) -> Array:
    """The projection of K and V, (2, size), as (2, WIDTH + 1)."""
    size = kv_vectors.shape[1]
    bits = np.unpackbits(np.frombuffer(random_bytes(f"signs/{layer}", 2 * size * WIDTH // 8), np.uint8))
    signs = bits.reshape(2, size, WIDTH).astype(np.float32) * 2 - 1
    small = np.einsum("vs,vsw->vw", kv_vectors, signs) / np.sqrt(WIDTH)
    return np.concatenate([small, np.linalg.norm(kv_vectors, axis=1, keepdims=True)], axis=1)


def compare(consumer: Sketch, producer: Sketch) -> SketchAgreement:
    """Whether the engine of `consumer` would compute the same KV caches as that of `producer`, up to rounding."""
    names = f"{producer.engine} and {consumer.engine}"
    formats = {(end.rounding, end.layout.dtype) for end in (consumer, producer)}
    if consumer.tokenizer != producer.tokenizer:
        return SketchAgreement(f"{names} have different tokenizers")
    if replace(consumer.layout, dtype=producer.layout.dtype) != producer.layout:
        return SketchAgreement(f"{names} keep KV caches of different shapes")
    if rope_difference := difference(producer.ropes, consumer.ropes):
        return SketchAgreement(f"{names} compute different keys, {rope_difference}")
    if not all(_common_positions(consumer, producer, row) for row in range(len(consumer.numbers))):
        return SketchAgreement(f"{names} were looked at in prompts of other lengths: give both the same context")
    tolerances = TOLERANCES[_coarsest(consumer, producer)]
    layers, problem = [], ""
    for layer in range(len(consumer.numbers)):
        tolerance = tolerances[layer > 0]
        places, distances, norms = _distances(consumer, producer, layer)
        keys, values = np.sort(distances, axis=1)[:, -1 - len(places) // _POSITIONS_PER_OUTLIER].tolist()
        layers.append((keys, values, tolerance))
        if not problem and not max(keys, values) <= tolerance:
            part = int(keys <= tolerance)
            first = places[int(np.argmax(~(distances[part] <= tolerance)))]
            problem = (
                f"{names} compute different KV caches: in {_place(consumer.layout, layer, first, part)} "
                f"differs by up to {distances[part].max():.1%}, and rounding makes {tolerance:.2%} at most; "
                "likely because " + _likely_cause(distances, norms, places, tolerance)
            )
    return SketchAgreement(problem, len(formats) > 1, tuple(layers))


def _place(layout: KVLayout, row: int, position: int, part: int) -> str:
    if row < layout.num_layers:
        return f"layer {row}, from position {position:,} on, {'KV'[part]}"
    name = ("the convolution's columns", "the recurrent matrix")[part]
    return f"layer {layout.state_layers[row - layout.num_layers]}, after position {position:,}, {name}"


def _coarsest(left: Sketch, right: Sketch) -> str:
    """The coarsest rounding involved in either KV cache."""
    roundings = {left.rounding, right.rounding}
    # Equal weights are rounded equally, so differences can only come from kernels. These round activations to 8 bits at
    # the coarsest.
    if left.weights == right.weights:
        roundings = {min(rounding, "q8", key=_ROUNDINGS.index) for rounding in roundings}
    return max(roundings | {left.layout.dtype, right.layout.dtype}, key=_ROUNDINGS.index)


def _common_positions(left: Sketch, right: Sketch, layer: int) -> list[int]:
    """The positions of a layer that are in both sketches."""
    return sorted(set.intersection(*(set(positions(end.layout, layer, end.tokens)) for end in (left, right))))


def _distances(consumer: Sketch, producer: Sketch, layer: int) -> tuple[list[int], Array, Array]:
    """The common positions of a layer, and how far the two sketches differ there: (K and V, positions), in total and in
    norm.

    The differences are shares of the norm at that position, or of the median norm if that position's is smaller.
    """
    places = _common_positions(consumer, producer, layer)
    consumer_numbers, producer_numbers = (
        end.numbers[layer][:, [positions(end.layout, layer, end.tokens).index(place) for place in places]]
        for end in (consumer, producer)
    )
    norms = np.maximum(consumer_numbers[..., -1], producer_numbers[..., -1])
    usual = np.maximum(np.maximum(norms, np.median(norms, axis=1, keepdims=True)), np.finfo(np.float32).tiny)
    in_norm = np.abs(consumer_numbers[..., -1] - producer_numbers[..., -1]) / usual
    return (
        places,
        np.maximum(np.linalg.norm(consumer_numbers[..., :-1] - producer_numbers[..., :-1], axis=-1) / usual, in_norm),
        in_norm,
    )


def _likely_cause(distances: Array, norms: Array, places: Sequence[int], tolerance: float) -> str:
    """The likely cause of the differences that `_distances` found in the first layer that differs."""
    off = ~(distances <= tolerance)
    first = int(np.argmax(off.any(axis=0)))
    outliers = len(places) // _POSITIONS_PER_OUTLIER
    if off[1].sum() <= outliers and (norms[0] > tolerance).sum() <= outliers:
        # A different rotation changes a key's direction, but not its length.
        if places[0]:
            return "of RoPE's base or scaling, or of interleaved pairs: only the direction of keys differs"
        if not first:
            return "one keeps pairs of keys interleaved and the other in halves: position 0 differs"
        if distances[0, first] < distances[0].max() / 2:
            return "of RoPE's base or scaling: it is absent at position 0 and grows with the position"
        return "of RoPE's scaling, or of interleaved pairs: only position 0 is the same"
    if not first:
        return "they hold other weights"
    return f"of a sliding window, or of attention: nothing differs up to position {places[first - 1]:,}"


class SketchStore(Protocol):
    """Where sketches are stored by name: the cluster state."""

    def put_sketch(self, name: str, body: bytes) -> None:
        """Store a sketch."""

    def get_sketch(self, name: str) -> bytes | None:
        """The sketch with this name, or None."""


class Sketches:
    """A worker's own sketch, and the results of comparing others with it. Thread-safe.

    Without its own sketch (because the engine has none, or because one process has both roles), it only accepts KV
    caches without a sketch.
    """

    def __init__(self, sketch: Sketch | None = None, store: SketchStore | None = None) -> None:
        self.name = sketch.name if sketch else ""
        self.refusals: dict[str, str] = {}  # name of a refused sketch -> a sentence that says why it is refused
        self._sketch = sketch
        self._store = store
        self._agreements = {self.name: SketchAgreement("")}

    def publish(self) -> None:
        """Store this worker's sketch, so that others can compare theirs with it."""
        if self._sketch and self._store:
            self._store.put_sketch(self.name, self._sketch.body)

    def agreement(self, name: str) -> SketchAgreement:
        """Whether to accept KV caches from the producer with the sketch `name`. It is compared once, as soon as it is
        found."""
        if name not in self._agreements:
            if not self._sketch or not self._store or not name:
                return SketchAgreement("its producer and this worker did not both leave a sketch of what they compute")
            body = self._store.get_sketch(name)
            if body is None:
                return SketchAgreement("the sketch of its producer is not in the store, so nothing was compared")
            try:
                self._agreements[name] = compare(self._sketch, read_sketch(body, name))
            except KVTransferFailed as error:  # an error is not remembered, because the stored bytes can be replaced
                return SketchAgreement(str(error))
            if self._agreements[name].problem:
                self.refusals[name] = self._agreements[name].problem
        return self._agreements[name]


def sketch_name(body: bytes) -> str:
    """The hash under which a sketch is stored."""
    return hashlib.blake2b(body, digest_size=16, person=b"kvasir.sketch").hexdigest()


def random_bytes(name: str, size: int) -> bytes:
    """Bytes that are the same everywhere and for ever, which no library's random generator guarantees."""
    return hashlib.shake_128(f"kvasir.sketch/{VERSION}/{name}".encode()).digest(size)
