"""The transformers engine's entry."""

from engines.base import Capabilities
from engines.entry import EngineEntry

ENGINE = EngineEntry(
    name="transformers",
    module="engines.transformers.engine",
    capabilities=Capabilities.local(transfers_kv=True, blocks_while_computing=True),
    weights="FOLDER or hub name",
    weights_type="path or hub name",
    weights_text="Folder in Hugging Face's form, or hub name",
    packages=("torch", "transformers"),
    extra="torch",
    family="canonical",
)
