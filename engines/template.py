"""Chat templates are programs by a model's author. They run in Jinja's sandbox, and are tested before they are used.

A sandbox keeps a program from reaching anything outside, but not from using all time and memory. So a template is first
rendered in a separate process with limits. This file is also that process's program.
"""

import json
import resource
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

_LONGEST = 1 << 20  # maximum number of characters that a template is allowed to put around nearly empty messages

# Each template is tried on these conversations. It is allowed to refuse some of them, but the text that it prints must
# stay within the limits.
_CONVERSATIONS = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("system", *("user", "assistant") * 127, "user"),  # the longest conversation that a job is allowed to have
)


def sandbox() -> ImmutableSandboxedEnvironment:
    """An environment in which a template can't reach anything that it is not given."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment


def rendered(template: Template, messages: list[dict[str, Any]], tokens: dict[str, str], today: datetime) -> str:
    """These messages and the start of the assistant's answer. Raises the template's errors."""
    return template.render(
        messages=messages,
        add_generation_prompt=True,
        tools=None,
        documents=None,
        strftime_now=today.strftime,
        **tokens,
    )


@lru_cache(16)
def require_bounded(text: str, tokens: tuple[tuple[str, str], ...], name: str) -> None:
    """Raises ConfigError if rendering a short conversation, or a long one, takes too much time or memory."""
    from messages.errors import ConfigError  # imported here, because the separate process can't import Kvasir packages
    from messages.limits import MAX_TEMPLATE_MEMORY_BYTES, TEMPLATE_S

    trial = json.dumps([text, dict(tokens), TEMPLATE_S, MAX_TEMPLATE_MEMORY_BYTES]).encode()
    command = [sys.executable, "-I", __file__]
    try:
        subprocess.run(command, input=trial, capture_output=True, timeout=4 * TEMPLATE_S, check=True)
    except subprocess.SubprocessError as error:
        raise ConfigError(
            f"the chat template of {name} takes more than {TEMPLATE_S} s or {MAX_TEMPLATE_MEMORY_BYTES >> 20} MiB to "
            f"print a conversation ({error}): use another template, or fix this one"
        ) from None


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter is not used, because it escapes < and > for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise(message: str) -> str:
    raise TemplateError(message)


def _try(text: str, tokens: dict[str, str], seconds: int, memory: int) -> None:
    """Render the template within these limits, or die."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    with suppress(ValueError, OSError):  # macOS does not have this limit
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    for roles in _CONVERSATIONS:
        messages = [{"role": role, "content": "x"} for role in roles]
        try:
            if len(rendered(sandbox().from_string(text), messages, tokens, datetime.now(UTC))) > _LONGEST:
                sys.exit(1)
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001  an error about a conversation is reported when it is used
            continue


if __name__ == "__main__":
    _try(*json.load(sys.stdin))
