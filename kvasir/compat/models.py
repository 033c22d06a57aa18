"""The earlier scripts' names for models, resolved through [models] of kvasir.toml."""

from __future__ import annotations

from infra.config.settings import Settings
from messages.errors import ConfigError

PREFIX = "disaggregated:"
SHORT_NAMES = ("qwen", "gpt-oss")


def resolve_model(settings: Settings, name: str) -> str:
    """The configured model that `name` means: itself, without the prefix `disaggregated:`, or by a short name.

    A short name means the one configured model whose name begins so; of several, the one that [grading] names.
    Raises ConfigError if there is none, or no way to choose.
    """
    bare = name.removeprefix(PREFIX)
    if bare in settings.models or bare not in SHORT_NAMES:
        return settings.model(bare).name
    fitting = [model for model in settings.models if model.rpartition("/")[2].lower().startswith(bare)]
    preferred = [model for model in fitting if model in (settings.grading.code_model, settings.grading.feedback_model)]
    for found in (fitting, preferred):
        if len(found) == 1:
            return found[0]
    if not fitting:
        configured = ", ".join(sorted(settings.models)) or "none"
        raise ConfigError(f"no configured model's name begins with {bare!r}; configured: {configured}")
    raise ConfigError(f"{bare!r} may mean {' or '.join(sorted(fitting))}; name one, or set it in [grading]")
