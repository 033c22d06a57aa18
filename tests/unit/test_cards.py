"""What a worker's card says of its KV cache."""

import msgpack

from messages import codec
from messages.cards import MAX_LAYOUT_BYTES, WorkerCard, layout_text
from messages.kv import KVLayout


def test_a_layout_is_told_in_one_line() -> None:
    assert layout_text(KVLayout(48, 4, 128, "f16")) == "48 layers x 4 kv_heads x 128 head_dim; f16"
    assert layout_text(KVLayout(4, 2, 16, "bf16", 8, (0, 3))).endswith(", window 8 in layers 0 3; bf16")
    assert layout_text(None) == ""


def test_a_layout_of_any_model_fits_on_a_card() -> None:
    uneven = tuple(n for n in range(1024) if n % 3)
    assert len(layout_text(KVLayout(1024, 8, 128, "bf16", 128, uneven))) <= MAX_LAYOUT_BYTES


def test_a_card_of_a_worker_that_tells_no_layout_is_read() -> None:
    card = WorkerCard("w", "decode", "m", "simulated", "cpu", "", "", 1, 1, "h", 1, 0.0, layout="2 layers; f16")
    fields = msgpack.unpackb(codec.encode(card))
    assert codec.decode(msgpack.packb(fields), WorkerCard) == card
    del fields["layout"]
    assert codec.decode(msgpack.packb(fields), WorkerCard).layout == ""
