"""What a worker's registration says of its KV cache."""

import dataclasses

import msgpack
import pytest

from messages import codec
from messages.errors import InvalidMessage
from messages.kv import KVLayout
from messages.workers import MAX_LAYOUT_BYTES, WorkerInfo, layout_text


def test_a_layout_is_told_in_one_line() -> None:
    assert layout_text(KVLayout(48, 4, 128, "f16")) == "48 layers x 4 kv_heads x 128 head_dim; f16"
    assert layout_text(KVLayout(4, 2, 16, "bf16", 8, (0, 3))).endswith(", window 8 in layers 0 3; bf16")
    mixed = KVLayout(6, 2, 192, "f32", v_head_dim=128, recurrent_layers=(0, 2, 4), both_layers=(5,))
    said = "6 layers x 2 kv_heads x 192 head_dim of K, 128 of V, recurrent layers 0-4 step 2, both layers 5; f32"
    assert layout_text(mixed) == said
    assert layout_text(KVLayout(6, 2, 192, "f32", v_head_dim=192)) == layout_text(KVLayout(6, 2, 192, "f32"))
    assert layout_text(None) == ""


def test_a_layout_of_any_model_fits_on_a_registration() -> None:
    uneven = tuple(n for n in range(1024) if n % 3)
    assert len(layout_text(KVLayout(1024, 8, 128, "bf16", 128, uneven))) <= MAX_LAYOUT_BYTES


def test_a_registration_of_a_worker_of_the_version_before_is_read() -> None:
    registration = WorkerInfo("w", "decode", "m", "simulated", "cpu", "", "", 1, 1, "h", 1, 0.0)
    fields = msgpack.unpackb(codec.encode(registration)) | {"v": 1, "hands_over": True}
    assert codec.decode(msgpack.packb(fields), WorkerInfo) == dataclasses.replace(registration, transfers_kv=True)
    with pytest.raises(InvalidMessage, match="hands_over"):
        codec.decode(msgpack.packb(fields | {"v": 2}), WorkerInfo)


def test_a_registration_of_a_worker_that_tells_no_layout_is_read() -> None:
    registration = WorkerInfo("w", "decode", "m", "simulated", "cpu", "", "", 1, 1, "h", 1, 0.0, layout="2 layers; f16")
    fields = msgpack.unpackb(codec.encode(registration))
    assert codec.decode(msgpack.packb(fields), WorkerInfo) == registration
    del fields["layout"]
    assert codec.decode(msgpack.packb(fields), WorkerInfo).layout == ""


def test_a_refusal_of_a_sketch_has_its_reason_and_there_are_few() -> None:
    registration = WorkerInfo("w", "decode", "m", "simulated", "cpu", "", "", 1, 1, "h", 1, 0.0)
    whole = dataclasses.replace(registration, refuses=("5e7c40",), refuses_because=("of a sliding window",))
    assert codec.decode(codec.encode(whole), WorkerInfo) == whole
    for refuses, because in [(("5e7c40",), ()), ((), ("why",)), (("a",) * 17, ("why",) * 17), ((1,), ("why",))]:
        with pytest.raises(InvalidMessage, match="refuses"):
            dataclasses.replace(registration, refuses=refuses, refuses_because=because)  # type: ignore[arg-type]
