"""An engine's sketch (`engines.sketch`): computed when a worker first loads a model, and kept in a file."""

from collections.abc import Sequence

import numpy as np

from engines.base import EngineInfo, PrefillEngine
from engines.cached import note_path, write_note
from engines.sketch import (
    TOKENS,
    VERSION,
    Sketch,
    numbers_shape,
    positions,
    project,
    prompt_ids,
    read_sketch,
    sketch_name,
)
from messages.errors import KVTransferFailed
from messages.kv import Array, KVLayout, Record, RecurrentState, Window, cast


def sketch_of(engine: PrefillEngine) -> Sketch | None:
    """The engine's sketch; None if the engine reports no vocabulary, and so can only exchange KV caches with its own
    kind.

    It is computed by a prefill of at most 2,047 tokens, once for each combination of weights, tokenizer, build, device
    and dtype, and kept in the user's cache folder. Raises the engine's errors.
    """
    info = engine.info
    if not info.vocabulary or info.layout is None:
        return None
    weights, tokens = info.weights or info.fingerprint, _num_tokens(info)
    described = (info.engine, info.build, info.device, info.layout, info.rounding, info.ropes, info.tokenizer)
    made_by = (VERSION, weights, *described, tokens)
    note = note_path("sketches", repr(made_by))
    try:
        body = note.read_bytes()
        return read_sketch(body, sketch_name(body))
    except (OSError, KVTransferFailed):
        pass  # no sketch is stored yet, or its file is damaged
    sketch = fresh_sketch(engine, info.layout)
    write_note(note, sketch.body)
    return sketch


def fresh_sketch(engine: PrefillEngine, layout: KVLayout) -> Sketch:
    """The engine's sketch, computed now and not stored. Raises the engine's errors."""
    info, tokens = engine.info, _num_tokens(engine.info)
    numbers = compute_numbers(engine, layout, prompt_ids(info.vocabulary, tokens))
    weights = info.weights or info.fingerprint
    return Sketch(info.engine, info.rounding, weights, info.tokenizer, tokens, layout, info.ropes, numbers)


def _num_tokens(info: EngineInfo) -> int:
    return min(TOKENS, info.context) - 1  # without the prompt's last token, which the decoder computes


def compute_numbers(engine: PrefillEngine, layout: KVLayout, ids: Sequence[int]) -> Array:
    """The numbers of a sketch, from a prefill of `ids`. Raises the prefill's errors, and KVTransferFailed for inf or
    nan."""
    numbers = np.zeros(numbers_shape(layout), np.float32)

    def add_record(record: Record) -> None:
        if isinstance(record, RecurrentState):
            row = layout.num_layers + layout.state_layers.index(record.layer)
            for index, part in enumerate(layout.state_parts(record.data)):
                if part.size:
                    numbers[row, index, 0] = project(row, np.stack([part.reshape(-1)] * 2))[index]
            return
        layers = layout.window_layers if isinstance(record, Window) else layout.full_layers
        rows = record.data.shape[2]
        first = record.position - rows if isinstance(record, Window) else record.start
        for place, position in enumerate(positions(layout, layers[0], len(ids))):
            if first <= position < first + rows:
                data = cast(record.data[:, :, position - first], layout.dtype, "f32").reshape(len(layers), 2, -1)
                for layer, vectors in zip(layers, data, strict=True):
                    numbers[layer, :, place] = project(layer, vectors)

    engine.prefill(ids, add_record)
    return numbers
