"""Tokenizes prompts for a Hugging Face model folder, with its own tokenizer and chat template.

`engines.chat` explains how. The ids equal those of llama.cpp for the same model.
"""

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer

from engines.chat import SAMPLE, ChatPrompt, cut_inside, sample_words, vocabulary_hash
from engines.huggingface.weights import read_json
from engines.template import rendered, require_bounded, sandbox
from messages.errors import ConfigError, InvalidPrompt
from messages.jobs import user_prompt

# Converters to GGUF turn every token that is spelled like this into a control token, whether it was declared special or
# not.
_SPELLED_LIKE_CONTROL = re.compile(r"<[|｜].*[|｜]>\Z", re.DOTALL)
# Tokens that end an answer in several model families, even if a model's configuration doesn't list them.
_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<|return|>",
         "<|call|>")  # fmt: skip


class HFPrompt(ChatPrompt):
    """Tokenizes prompts with a folder's own tokenizer and chat template. Callable from any thread.

    `end_ids` end an answer; `control_ids` have no text of their own; `tokenizer_json` is the tokenizer as JSON text,
    of which `added_tokens` (texts by id) and `decoder_types` are kept: a large one takes a second to parse.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError, in one sentence, if tokenizer or template is missing or can't be used."""
        super().__init__()
        settings = read_json(folder / "tokenizer_config.json")
        definition = read_json(folder / "tokenizer.json")
        control = _declare_control_tokens(definition)
        self.tokenizer_json = json.dumps(definition)
        self.control_ids = frozenset(entry["id"] for entry in control)
        self.added_tokens = {entry["id"]: entry["content"] for entry in definition.get("added_tokens") or ()}
        self.decoder_types = _decoder_types(definition)
        # Some models declare marks such as `<turn|>` and `<tool_response>` as ordinary tokens. Even so, no text from a
        # user is allowed to become such a mark.
        marks = [entry for entry in definition.get("added_tokens") or [] if entry["content"].strip()]
        self._control = _control_pattern(marks)
        # llama.cpp turns such an ordinary mark into one token, even in a user's text. To prevent this, the llama.cpp
        # engine cuts a text inside each mark. This class does the same, so that both get the same ids.
        self._ordinary_marks = _pattern([re.escape(entry["content"]) for entry in marks if not entry.get("special")])
        self._parsing = _load(self.tokenizer_json, folder)
        for entry in marks:
            entry["special"] = True
        # A Unigram model also lists the marks among its pieces, sometimes as the likeliest ones. So each of these
        # pieces gets a random name that no text will contain.
        if definition["model"].get("type") == "Unigram":
            hidden = {entry["content"]: secrets.token_hex(16) for entry in marks}
            definition["model"]["vocab"] = [
                [hidden.get(piece, piece), score] for piece, score in definition["model"]["vocab"]
            ]
        self._plain = _load(json.dumps(definition), folder)
        self._plain.encode_special_tokens = True
        self._template = _Template(folder, settings)
        self.end_ids = self._find_end_ids(folder, settings)
        rules = _merges(definition) if _is_byte_level(definition) else sample_words(self.plain_ids)
        self.tokenizer_hash = vocabulary_hash(self.token_texts(), rules)
        self.chars_per_token = len(SAMPLE) / max(1, len(self.plain_ids(SAMPLE)))
        if self._template.text:
            self.require_template()
            self._require_pieces_to_fit(folder)

    def raw_ids(self, text: str) -> Sequence[int]:
        """See ChatPrompt."""
        return self._plain.encode(text, add_special_tokens=True).ids

    def render(self, messages: list[dict[str, Any]], clock: float) -> str:
        """See ChatPrompt."""
        return self._template.render(messages, clock)

    def control_span(self, text: str) -> tuple[int, int]:
        """See ChatPrompt."""
        matches = list(self._control.finditer(text))
        return (matches[0].start(), matches[-1].end()) if matches else (len(text), 0)

    def piece_ids(self, text: str, begins: bool, control: bool) -> Sequence[int]:
        """See ChatPrompt. A piece has the same ids wherever it appears."""
        if control:
            return self._parsing.encode(text, add_special_tokens=False).ids
        pieces = cut_inside(text, self._ordinary_marks.finditer(text))
        return [number for piece in pieces for number in self._plain.encode(piece, add_special_tokens=False).ids]

    def plain_ids(self, text: str) -> tuple[int, ...]:
        """Ids of a bare text; no control tokens."""
        return tuple(self.piece_ids(text, begins=False, control=False))

    def count_tokens(self, text: str) -> int:
        """The number of tokens in a bare text."""
        return len(self.plain_ids(text))

    def control_id(self, text: str) -> int | None:
        """The id of the control token with this text, or None."""
        number = self._parsing.token_to_id(text)
        return number if number in self.control_ids else None

    def token_texts(self) -> list[str]:
        """The text of each id as the tokenizer stores it; "" for an id without text."""
        vocabulary = self._parsing.get_vocab(with_added_tokens=True)
        texts = [""] * (max(vocabulary.values(), default=-1) + 1)
        for text, number in vocabulary.items():
            texts[number] = text
        return texts

    def _require_pieces_to_fit(self, folder: Path) -> None:
        """Refuse a tokenizer that treats the start of a piece differently from the middle of a text."""
        sample = SAMPLE.strip()
        whole = self.render([{"role": "user", "content": sample}], 0.0)
        if tuple(self.piece_ids(whole, begins=True, control=True)) != self.tokenize(user_prompt("", sample), 0.0).ids:
            raise ConfigError(
                f"the tokenizer of {folder} can't be used: cutting a text at control tokens changes the token ids"
            )

    def _find_end_ids(self, folder: Path, settings: dict[str, Any]) -> frozenset[int]:
        end_ids: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            eos_token_id = read_json(folder / name, optional=True).get("eos_token_id")
            end_ids |= set(eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]) - {None}
        names = [*_ENDS, _token_text(settings.get("eos_token"))]
        return frozenset(end_ids | {number for name in names if (number := self.control_id(name)) is not None})


class _Template:
    """A folder's chat template, run in a sandbox. If there is none, its text is ""."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._folder = folder
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        self._tokens = {name: _token_text(settings.get(name)) for name in names}
        self.text = _template_text(folder, settings)
        require_bounded(self.text, tuple(self._tokens.items()), str(folder))
        try:
            self._template = sandbox().from_string(self.text)
        except TemplateError as error:
            raise ConfigError(f"the chat template of {folder} is not valid: {error}") from None

    def render(self, messages: list[dict[str, Any]], clock: float) -> str:
        """These messages, and the opening of the assistant's answer. Raises InvalidPrompt."""
        if not self.text:
            raise InvalidPrompt(
                f"{self._folder} has no chat template, so the model can continue a text but can't answer messages"
            )
        today = datetime.fromtimestamp(clock, UTC)
        try:
            return rendered(self._template, messages, self._tokens, today)
        except Exception as error:  # noqa: BLE001  a template is a program of its author and may fail in any way
            raise InvalidPrompt(f"the chat template of {self._folder} can't be rendered: {error}") from None


def _declare_control_tokens(definition: dict[str, Any]) -> list[dict[str, Any]]:
    """The added tokens that are control tokens, after declaring each one special in `definition`."""
    added_tokens = definition.get("added_tokens") or []
    control = [entry for entry in added_tokens if entry.get("special") or _SPELLED_LIKE_CONTROL.match(entry["content"])]
    for entry in control:
        entry["special"] = True
    return control


def _control_pattern(control: Iterable[dict[str, Any]]) -> re.Pattern[str]:
    """A pattern that matches any control token, with the white space that it absorbs on either side."""
    entries = sorted(control, key=lambda entry: -len(entry["content"]))
    choices = [
        (r"\s*" if entry.get("lstrip") else "") + re.escape(entry["content"]) + (r"\s*" if entry.get("rstrip") else "")
        for entry in entries
    ]
    return _pattern(choices)


def _pattern(choices: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(choices) or r"(?!)")


def _load(definition: str, folder: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(definition)
    except Exception as error:  # noqa: BLE001  the library raises plain Exception
        raise ConfigError(f"{folder / 'tokenizer.json'} can't be read as a tokenizer: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _decoder_types(definition: dict[str, Any]) -> set[str]:
    decoder = definition.get("decoder") or {}
    return {part.get("type", "") for part in (decoder, *decoder.get("decoders", ()))}


def _is_byte_level(definition: dict[str, Any]) -> bool:
    """Whether each byte is represented by a letter, as in GPT-2's vocabulary."""
    return '"ByteLevel"' in json.dumps([definition.get("pre_tokenizer"), definition.get("decoder")])


def _merges(definition: dict[str, Any]) -> list[str]:
    merges = definition.get("model", {}).get("merges") or []
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def _template_text(folder: Path, settings: dict[str, Any]) -> str:
    """The template from chat_template.jinja, otherwise from tokenizer_config.json (the default one if there are
    several)."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        template = settings.get("chat_template")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / 'chat_template.jinja'} can't be read: {error}") from None
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    return template if isinstance(template, str) else ""


def _token_text(token: Any) -> str:
    """The text of a token that a configuration gives as text, or as an object with its text."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
