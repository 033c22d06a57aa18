"""The llamacpp engine's entry."""

from pathlib import Path

from engines.base import Capabilities
from engines.entry import EngineEntry, EngineOptions

SERVER_SCHEMES = ("http://", "https://", "unix://")  # how the address of a running server can begin


class _LlamaCpp(EngineEntry):
    def install_command(self, weights: str = "") -> str:
        """Either the package or the program is enough."""
        from engines.llamacpp.server import find_program

        return "" if find_program() else super().install_command(weights)

    def check(self, options: EngineOptions) -> tuple[str, str]:
        """Reads the file's header. A URL always passes."""
        from engines.llamacpp.gguf_file import read_gguf
        from engines.llamacpp.ollama_models import SCHEME, check_dialect, find_gguf

        if not options.weights.startswith(SERVER_SCHEMES):
            name = options.weights.removeprefix("llama-server:").partition("?health_s=")[0]
            check_dialect(read_gguf(find_gguf(name.removeprefix(SCHEME)) if name.startswith(SCHEME) else Path(name)))
        return super().check(options)


ENGINE = _LlamaCpp(
    name="llamacpp",
    module="engines.llamacpp.engine",
    capabilities=Capabilities.local(transfers_kv=True),
    weights="FILE.gguf, ollama:NAME, llama-server:FILE.gguf, http://HOST:PORT?slots=FOLDER",
    packages=("xllamacpp",),
    extra="llamacpp",
    family="canonical",
    note="a GPU that the wheel has no build for needs llama-server on PATH",
    has_slot_files=True,
    mend_device="put a {device} build of llama-server on its PATH, and --weights llama-server:FILE.gguf",
)
