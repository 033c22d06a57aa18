"""Renders the chat template of a Hugging Face model folder around a user message, and tokenizes it.

A student's text must never become a control token, even if it spells one (`<|im_end|>`). So the template is rendered
around a marker, never around the text: what stands before and after the marker is the template's own. The template's
text up to its last control token before the message, and from its first one after it, is tokenized with control
tokens recognised; the message, with the plain template text that touches it, as one piece without. Tokenizers cut at
control tokens before anything else, so for a harmless message the ids are those of the whole text at once, and those
that llama.cpp gives for the same model.

A template that changes with what the user says can't be rendered this way; one that trims the message is recognised.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from engines.base import Tokenized
from engines.vocabulary import vocabulary_hash
from messages.errors import ConfigError

_MARKER = "kvasir7c1e5a93marker"
_PADDING = " \n"
# What may follow the class-wide part. Where one of these changes how its end is tokenized, that end is not shared.
_FOLLOWERS = ("", "a", "A", "0", " ", " a", "\n", "\n\n", ".", "_", "'s", "é", "语")
_REMEMBERED = 64
# Converters to GGUF make a control token of whatever is spelled like one, declared special or not.
_SPELLED_LIKE_CONTROL = re.compile(r"<[|｜].*[|｜]>\Z", re.DOTALL)
# Tokens that end an answer in the model families that have them, whatever their configuration lists.
_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<|return|>",
         "<|call|>")  # fmt: skip
SAMPLE = """def mean(values: list[float]) -> float:
    \"\"\"Arithmetic mean; 0.0 for an empty list.\"\"\"
    return sum(values) / len(values) if values else 0.0

The loop visits every element twice, so the running time grows with the square of the input. A dictionary would make
one pass enough. Names are clear and the tests cover the empty list, but not negative numbers.
"""


@dataclass(frozen=True, slots=True)
class _Frame:
    """What the template puts around a message: control tokens outside, plain text next to the message."""

    before: str
    plain_before: str
    plain_after: str
    after: str


class HFPrompt:
    """Tokenizes prompts with a folder's own tokenizer and chat template. Callable from any thread.

    `end_ids` end an answer; `control_ids` have no text of their own; `tokenizer_json` is the tokenizer as JSON text.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError, in one sentence, if tokenizer or template is missing or can't be used."""
        settings = read_json(folder / "tokenizer_config.json")
        definition = read_json(folder / "tokenizer.json")
        control = _declare_control_tokens(definition)
        self.tokenizer_json = json.dumps(definition)
        self.control_ids = frozenset(entry["id"] for entry in control)
        self._control = _control_pattern(control)
        self._parsing, self._plain = _load(self.tokenizer_json, folder), _load(self.tokenizer_json, folder)
        self._plain.encode_special_tokens = True
        self._template = _Template(folder, settings)
        self.end_ids = self._find_end_ids(folder, settings)
        self.tokenizer_hash = vocabulary_hash(self.token_texts(), _merges(definition))
        self.chars_per_token = len(SAMPLE) / max(1, len(self.plain_ids(SAMPLE)))
        self._lock = threading.Lock()
        self._shared: OrderedDict[tuple[_Frame, str], tuple[int, ...]] = OrderedDict()
        before, after = self._render(_PADDING + _MARKER + _PADDING, 0.0)
        self._trims_start = not before.endswith(_PADDING)
        self._trims_end = not after.startswith(_PADDING)
        self._require_pieces_to_fit(folder)

    def tokenize(self, shared: str, own: str, clock: float) -> Tokenized:
        """See `engines.base.Tokenizes.tokenize`. Templates that print the date get the day of `clock`, UTC."""
        frame = self._frame(clock)
        ids = self._ids(frame, shared + own)
        return Tokenized(ids, common_prefix(ids, self._shared_ids(frame, shared)) if shared else 0)

    def plain_ids(self, text: str) -> tuple[int, ...]:
        """Ids of a bare text; no control tokens."""
        return tuple(self._plain.encode(text, add_special_tokens=False).ids)

    def count_tokens(self, text: str) -> int:
        """How many tokens a bare text is."""
        return len(self.plain_ids(text))

    def control_id(self, text: str) -> int | None:
        """The id of the control token spelled so, if there is one."""
        number = self._parsing.token_to_id(text)
        return number if number in self.control_ids else None

    def token_texts(self) -> list[str]:
        """Each id's text as the tokenizer keeps it; "" where an id has none."""
        vocabulary = self._parsing.get_vocab(with_added_tokens=True)
        texts = [""] * (max(vocabulary.values(), default=-1) + 1)
        for text, number in vocabulary.items():
            texts[number] = text
        return texts

    def _ids(self, frame: _Frame, message: str) -> tuple[int, ...]:
        message = message.lstrip() if self._trims_start else message
        message = message.rstrip() if self._trims_end else message
        return (
            *self._template_ids(frame.before),
            *self.plain_ids(frame.plain_before + message + frame.plain_after),
            *self._template_ids(frame.after),
        )

    def _template_ids(self, text: str) -> list[int]:
        ids: list[int] = self._parsing.encode(text, add_special_tokens=False).ids
        return ids

    def _shared_ids(self, frame: _Frame, shared: str) -> tuple[int, ...]:
        """The ids that every prompt with this class-wide part begins with."""
        with self._lock:
            known = self._shared.get((frame, shared))
        if known is not None:
            return known
        # The x keeps a template that trims the message from eating a follower made of white space.
        variants = [self._ids(frame, shared + follower + "x") for follower in _FOLLOWERS]
        ids = variants[0][: min(common_prefix(variants[0], other) for other in variants[1:])]
        with self._lock:
            self._shared[frame, shared] = ids
            while len(self._shared) > _REMEMBERED:
                self._shared.popitem(last=False)
        return ids

    def _frame(self, clock: float) -> _Frame:
        before, after = self._render(_MARKER, clock)
        cut = max((match.end() for match in self._control.finditer(before)), default=0)
        found = self._control.search(after)
        resume = found.start() if found else len(after)
        return _Frame(before[:cut], before[cut:], after[:resume], after[resume:])

    def _render(self, message: str, clock: float) -> tuple[str, str]:
        """The template's text before and after the marker in `message`."""
        parts = self._template.render(message, clock).split(_MARKER)
        if len(parts) != 2:
            raise ConfigError(f"the model's chat template prints the user's message {len(parts) - 1} times, not once")
        return parts[0], parts[1]

    def _require_pieces_to_fit(self, folder: Path) -> None:
        """Refuse a tokenizer that treats the start of a piece unlike the middle of a text."""
        frame = self._frame(0.0)
        whole = frame.before + frame.plain_before + SAMPLE.strip() + frame.plain_after + frame.after
        if tuple(self._template_ids(whole)) != self._ids(frame, SAMPLE.strip()):
            raise ConfigError(f"the tokenizer of {folder} can't be used: cut at control tokens, a text has other ids")

    def _find_end_ids(self, folder: Path, settings: dict[str, Any]) -> frozenset[int]:
        listed: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            given = read_json(folder / name, optional=True).get("eos_token_id")
            listed |= set(given if isinstance(given, list) else [given]) - {None}
        names = [*_ENDS, _token_text(settings.get("eos_token"))]
        return frozenset(listed | {number for name in names if (number := self.control_id(name)) is not None})


class _Template:
    """A folder's chat template, run where it can reach nothing but what it is given."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._folder = folder
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        self._tokens = {name: _token_text(settings.get(name)) for name in names}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(_template_text(folder, settings))
        except TemplateError as error:
            raise ConfigError(f"the chat template of {folder} is not valid: {error}") from None

    def render(self, message: str, clock: float) -> str:
        """One user message, and the opening of the assistant's answer."""
        today = datetime.fromtimestamp(clock, UTC)
        try:
            return self._template.render(
                messages=[{"role": "user", "content": message}],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                strftime_now=today.strftime,
                **self._tokens,
            )
        except Exception as error:  # noqa: BLE001  a template is a program of its author's: it may fail in any way
            raise ConfigError(f"the chat template of {self._folder} can't be rendered: {error}") from None


def read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    """A JSON object from a model folder; {} where an optional one is missing. Raises ConfigError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if optional:
            return {}
        if not path.parent.is_dir():
            raise ConfigError(f"there is no model folder {path.parent}") from None
        raise ConfigError(f"{path.parent} is not a complete Hugging Face model folder: it has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return value


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many ids from the start are the same."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))


def _declare_control_tokens(definition: dict[str, Any]) -> list[dict[str, Any]]:
    """The added tokens that are control tokens, each now declared special in `definition`."""
    added = definition.get("added_tokens") or []
    control = [entry for entry in added if entry.get("special") or _SPELLED_LIKE_CONTROL.match(entry["content"])]
    for entry in control:
        entry["special"] = True
    return control


def _control_pattern(control: Iterable[dict[str, Any]]) -> re.Pattern[str]:
    """Matches any control token, with the white space that it swallows on either side."""
    spelled = sorted(control, key=lambda entry: -len(entry["content"]))
    choices = [
        (r"\s*" if entry.get("lstrip") else "") + re.escape(entry["content"]) + (r"\s*" if entry.get("rstrip") else "")
        for entry in spelled
    ]
    return re.compile("|".join(choices) or r"(?!)")


def _load(definition: str, folder: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(definition)
    except Exception as error:  # noqa: BLE001  the library raises plain Exception
        raise ConfigError(f"{folder / 'tokenizer.json'} is not a tokenizer that can be read: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _merges(definition: dict[str, Any]) -> list[str]:
    merges = definition.get("model", {}).get("merges") or []
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def _template_text(folder: Path, settings: dict[str, Any]) -> str:
    """The template from chat_template.jinja, else from tokenizer_config.json (of several, the default one)."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        template = settings.get("chat_template")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / 'chat_template.jinja'} can't be read: {error}") from None
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    if not isinstance(template, str) or not template:
        raise ConfigError(f"{folder} has no chat template; use an instruction-tuned model, or add chat_template.jinja")
    return template


def _token_text(value: Any) -> str:
    """A token named in a configuration as text, or as an object with its text."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    # Not Jinja's own filter, which escapes < and > for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise(message: str) -> str:
    raise TemplateError(message)
