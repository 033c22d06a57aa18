"""The vllm engine's entry."""

from engines.base import Capabilities
from engines.entry import EngineEntry, EngineOptions
from engines.vllm import environment


class _VLLM(EngineEntry):
    def install_command(self, weights: str = "") -> str:
        """The command for the extra, and then for vLLM's own environment, which a running server does not need."""
        if command := super().install_command(weights):
            return command
        # Only the environment's existence is checked. The environment may still lack vLLM, but that becomes known only
        # when Kvasir starts vLLM in it.
        return "" if _is_server(weights) or environment.python_path().is_file() else environment.COMMAND

    def check(self, options: EngineOptions) -> tuple[str, str]:
        """Checks that a server is there and has Kvasir's connector. A folder always passes."""
        from engines.vllm.attached import connect

        if not _is_server(options.weights):
            return super().check(options)
        connect(options.weights, options.api_key)[0].close()
        return f"vllm reaches {options.weights}, which has Kvasir's connector", ""


def _is_server(weights: str) -> bool:
    return weights.startswith(("http://", "https://"))


ENGINE = _VLLM(
    name="vllm",
    module="engines.vllm.engine",
    capabilities=Capabilities.local(transfers_kv=True, blocks_while_computing=True),
    weights="FOLDER or hub name, http://HOST:PORT?model=FOLDER",
    weights_type="path or hub name",
    weights_text="Folder in Hugging Face's form, hub name, or `http://HOST:PORT?model=FOLDER`",
    takes_api_key=True,
    packages=("tokenizers", "llguidance"),
    extra="vllm",
    family="canonical",
    note=f"runs in an environment of its own ({environment.SIZE}; tested with vLLM {environment.TESTED_RELEASE})",
)
