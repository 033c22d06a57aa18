"""JSON-schema constraints through LLGuidance, as bit masks over the vocabulary. Knows no tensor library.

One `Constrainer` for a loaded model, one `Constraint` for an answer.
"""

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from engines.guidance import guidance_schema
from engines.harmony import FinalChannel, final_channel
from engines.huggingface.prompt import HFPrompt
from messages.errors import ConfigError, InvalidSchema

Mask = NDArray[np.bool_]


class Constraint:
    """The tokens that may come next in one answer. Not safe for use by two threads at once."""

    def __init__(self, matcher: LLMatcher, num_tokens: int, ends: Mask, channel: FinalChannel | None) -> None:
        self._matcher = matcher
        self._num_tokens = num_tokens
        self._ends = ends
        self._channel = channel
        self._is_finished = False

    def accept(self, token: int) -> None:
        """Advance by one sampled token. Raises InvalidSchema if the schema has become too complex to follow."""
        if self._channel is not None and not self._channel.is_open:
            self._channel.observe(token)
            return
        if self._is_finished:
            return
        self._is_finished = bool(self._ends[token])
        if not self._matcher.consume_token(token) and not self._is_finished:
            raise InvalidSchema(f"the JSON schema can't be enforced: {self._matcher.get_error():.500}")

    def compute_mask(self) -> Mask:
        """For each token id, whether it may come next. Raises InvalidSchema under the same condition as `accept`."""
        if self._channel is not None and not self._channel.is_open:
            # All tokens except end tokens, because an answer must not end before its JSON begins.
            return ~self._ends
        if self._is_finished or self._matcher.is_stopped():
            return self._ends
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise InvalidSchema(f"the JSON schema can't be enforced: {self._matcher.get_error():.500}")
        mask = np.zeros(self._num_tokens, np.bool_)
        flags = np.unpackbits(bits, bitorder="little")[: self._num_tokens]
        mask[: len(flags)] = flags
        return mask


class Constrainer:
    """Makes constraints for one model. Callable from any thread."""

    def __init__(self, prompt: HFPrompt, num_tokens: int) -> None:
        """`num_tokens`: the width of the model's logits, which may exceed the tokenizer's vocabulary."""
        self._prompt = prompt
        self._num_tokens = num_tokens
        ends = sorted(number for number in prompt.end_ids if number < num_tokens)
        if not ends:
            raise ConfigError("neither the model's configuration nor its tokenizer names a token that ends an answer")
        self._ends = np.zeros(num_tokens, np.bool_)
        self._ends[ends] = True
        try:
            self._tokenizer = LLTokenizer(prompt.tokenizer_json, n_vocab=num_tokens, eos_token=ends)
        except ValueError as error:
            raise ConfigError(f"the model's tokenizer can't be used for JSON schemas: {error}") from None

    def start(self, schema: str) -> Constraint:
        """A constraint for one answer. For models that think first, it starts with the final channel.

        Raises InvalidSchema, which says why.
        """
        try:
            grammar = LLMatcher.grammar_from_json_schema(guidance_schema(schema))
        except ValueError as error:
            raise InvalidSchema(f"the JSON schema can't be enforced: {error}") from None
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise InvalidSchema(f"the JSON schema can't be enforced: {matcher.get_error():.500}")
        return Constraint(matcher, self._num_tokens, self._ends, final_channel(self._prompt))
