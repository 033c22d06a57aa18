"""The mlx engine's entry."""

from pathlib import Path

from engines.base import Capabilities
from engines.entry import EngineEntry, EngineOptions


class _MLX(EngineEntry):
    def check(self, options: EngineOptions) -> tuple[str, str]:
        """Reads the folder's configuration; a hub name passes."""
        from engines.huggingface.weights import open_folder
        from engines.mlx.folder import require_no_ignored_window

        if Path(options.weights.partition("?")[0]).expanduser().is_dir():
            require_no_ignored_window(open_folder(options.weights), options.context)
        return super().check(options)


ENGINE = _MLX(
    name="mlx",
    module="engines.mlx.engine",
    capabilities=Capabilities.local(transfers_kv=True, blocks_while_computing=True),
    weights="FOLDER or hub name",
    weights_type="path or hub name",
    weights_text="Folder in Hugging Face's form, or hub name",
    packages=("mlx", "mlx_lm"),
    extra="mlx",
    family="canonical",
)
