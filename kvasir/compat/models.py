"""Resolves the model names of the earlier scripts through [models] of kvasir.toml."""

from infra.config.settings import Settings
from messages.errors import ConfigError

PREFIX = "disaggregated:"
SHORT_NAMES = ("qwen", "gpt-oss")


def resolve_model(settings: Settings, name: str) -> str:
    """Return the configured model for `name`: the same name, without the prefix `disaggregated:`, or a short name.

    A short name means the only configured model whose name begins with it; if there are several, the one that [grading]
    names. Raises ConfigError if there is none, or if the choice is not clear.
    """
    bare = name.removeprefix(PREFIX)
    if bare in settings.models or bare not in SHORT_NAMES:
        return settings.model(bare).name
    matching_models = [model for model in settings.models if model.rpartition("/")[2].lower().startswith(bare)]
    preferred_models = [
        model for model in matching_models if model in (settings.grading.code_model, settings.grading.feedback_model)
    ]
    for candidates in (matching_models, preferred_models):
        if len(candidates) == 1:
            return candidates[0]
    if not matching_models:
        configured_names = ", ".join(sorted(settings.models)) or "none"
        raise ConfigError(
            f"no configured model's name begins with {bare!r}; the configured models are {configured_names}"
        )
    raise ConfigError(
        f"{bare!r} could be {' or '.join(sorted(matching_models))}: use a full name, or set the full name in [grading]"
    )
