"""One name for a vocabulary, whatever file it came from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence


def vocabulary_hash(tokens: Sequence[str], merges: Iterable[str]) -> str:
    """Names a tokenizer by each id's text and the merges ("a b"), whatever file they came from.

    A GGUF's `tokenizer.ggml.tokens` (without the "[PADn]" that fill it up) and `tokenizer.ggml.merges` of the same
    model give the same hash.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"kvasir.vocab")
    for part in (tokens, merges):
        digest.update("\0".join(part).encode("utf-8", "surrogatepass") + b"\1")
    return digest.hexdigest()
