"""Slot files as five releases of llama.cpp wrote them: each is read, and each is written as that release does.

The forms, in llama.cpp's sources as the releases' source packages hold them: magic, version and token list in
`llama_context::state_seq_save_file` (src/llama-context.cpp), the version itself in include/llama.h; a packed token list
in `server_tokens::serialize` (tools/server/server-common.cpp), which 2026.8.10566 has and 2026.8.10229 has not, both of
version 2; a cell's words in `llama_kv_cache::state_write_meta` and `llama_kv_cell_ext` (src/llama-kv-cells.h), whose
token came with version 3; the rotations in `llama_kv_cache::state_write_data` (src/llama-kv-cache.cpp), with version 4.
"""

from itertools import product

import numpy as np
import pytest

from engines.llamacpp.slotfile import SlotFile, SlotShape, build, parse, snapshot, to_blocks
from messages.errors import KVTransferFailed
from messages.kv import KVCache, KVLayout, assemble_cache
from tests.support.slot_recordings import MODELS, RELEASES, TOKENS, path_of

FORMS = dict(zip(RELEASES, [(2, False), (2, True), (3, True), (3, True), (4, True)], strict=True))


def shape_of(model: str, file: SlotFile) -> SlotShape:
    tiny = MODELS[model]
    windowed = tuple(range(0, tiny.layers, 2)) if model == "gpt-oss" else ()
    layout = KVLayout(
        tiny.layers, tiny.kv_heads, tiny.head_dim, "f16", window=tiny.window if windowed else 0, window_layers=windowed
    )
    return SlotShape(layout, False, version=file.version, packs_tokens=file.packs_tokens)


def cache_in(file: SlotFile, shape: SlotShape) -> KVCache:
    return assemble_cache(shape.layout, [*to_blocks(file, shape), *snapshot(file, shape)])


@pytest.mark.parametrize(("model", "release"), [*product(MODELS, RELEASES)])
def test_each_releases_file_is_read(model: str, release: str) -> None:
    file = parse(path_of(model, release).read_bytes())

    assert (file.version, file.packs_tokens, file.tokens) == (*FORMS[release], TOKENS)
    assert cache_in(file, shape_of(model, file)).num_tokens == len(TOKENS)


@pytest.mark.public_report("ggml-org/llama.cpp 26640", "ggml-org/llama.cpp 27943")
@pytest.mark.parametrize(("model", "sender", "receiver"), [*product(MODELS, RELEASES, RELEASES)])
def test_what_is_written_for_a_release_is_its_own_file_of_the_same_prompt(
    model: str, sender: str, receiver: str
) -> None:
    # Given one release's cache, and what another one writes of the same prompt
    sent = parse(path_of(model, sender).read_bytes())
    cache = cache_in(sent, shape_of(model, sent))
    own_bytes = path_of(model, receiver).read_bytes()
    own = parse(own_bytes)
    # When the first is written for the second
    written = build(TOKENS, cache, shape_of(model, own), own.streams)
    # Then it has the second's form, and numbers that only rounding can have changed
    assert (len(written), written[:48]) == (len(own_bytes), own_bytes[:48])
    again = cache_in(parse(written), shape_of(model, own))
    for one, other in zip(again.blocks, cache_in(own, shape_of(model, own)).blocks, strict=True):
        assert np.allclose(one.data, other.data, rtol=0.01, atol=0.01)
    assert sender != receiver or written == own_bytes


@pytest.mark.parametrize("release", RELEASES)
def test_a_recording_under_another_version_is_refused(release: str) -> None:
    recorded = path_of("qwen3", release).read_bytes()
    version = FORMS[release][0]
    for other in {2, 3, 4, 5} - {version}:
        if (version, other) in ((2, 3), (3, 2)) and FORMS[release][1]:
            continue  # their forms differ in models with M-RoPE alone
        with pytest.raises(KVTransferFailed):
            parse(recorded[:4] + other.to_bytes(4, "little") + recorded[8:])
