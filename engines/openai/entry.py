"""The openai engine's entry."""

from engines.base import Capabilities
from engines.entry import EngineEntry, EngineOptions


class _OpenAI(EngineEntry):
    def check(self, options: EngineOptions) -> tuple[str, str]:
        """Checks that the server is there, accepts the key, and has the model."""
        from engines.openai.engine import look_up

        external_host, is_listed = look_up(options)
        if external_host:
            todo = "be sure that students' work may go there, or serve the model inside"
            return f"prompts go to {external_host}, outside private networks (allow_external)", todo
        return f"openai reaches {options.weights}{'' if is_listed else ', which lists no models'}", ""


ENGINE = _OpenAI(
    name="openai",
    module="engines.openai.engine",
    capabilities=Capabilities.text_only(),
    weights="http://HOST:PORT/v1/MODEL",
    weights_type="text",
    takes_api_key=True,
    packages=("httpx",),
    note="any server of chat completions; the server does the prompt",
)
