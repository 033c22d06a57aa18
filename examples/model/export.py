"""Write what training has made in the two forms: `python -m examples.model.export RUN [RUN …] [--out DIR]`.

RUN is the folder that `examples.model.train` was given as --out. Of several runs, each begun from the one before, the
mean of the weights is written, with the loss curves of all of them. Needs NumPy, tokenizers, safetensors and gguf; no
PyTorch. Without --out the committed model is replaced; with it nothing is.
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from examples.model.formats import NAME, Weights, write_folder, write_gguf
from examples.model.shape import TRAINED

HERE = Path(__file__).resolve().parent
CURVES = "training.json"
ABOUT = "Trained on made-up assignments: it grades this family of toys and nothing else"


def export(runs: Sequence[Path], out: Path) -> None:
    """Write the folder, the GGUF file and the loss curves of a training run, or of the mean of several, into `out`.

    Raises ValueError if the weights hold a number that float16 doesn't have.
    """
    tokenizer = Tokenizer.from_file(str(runs[0] / "tokenizer.json"))
    first, *others = [read_weights(each / "weights.npz") for each in runs]
    weights = (
        {name: _mean([value, *(one[name] for one in others)]) for name, value in first.items()} if others else first
    )
    write_folder(out / NAME, TRAINED, tokenizer, weights)
    write_gguf(out / f"{NAME}.gguf", TRAINED, tokenizer, weights, ABOUT)
    shutil.copy(runs[-1] / CURVES, out / CURVES)


def _mean(values: Sequence[np.ndarray]) -> np.ndarray:
    made: np.ndarray = np.mean([value.astype(np.float32) for value in values], axis=0).astype(np.float16)
    return made


def read_weights(path: Path) -> Weights:
    """The weights by Hugging Face's names. Raises ValueError as `export`."""
    with np.load(path, allow_pickle=False) as stored:
        weights = {name: stored[name] for name in stored.files}
    for name, value in weights.items():
        if value.dtype != np.float16 or not np.isfinite(value).all():
            raise ValueError(f"{path}: {name} is not all finite float16: training has diverged")
    return weights


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a trained demo model in both of its forms.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a training run")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write to")
    given = parser.parse_args()
    export(given.runs, given.out)
    print(f"{given.out / NAME} and {given.out / NAME}.gguf")


if __name__ == "__main__":
    main()
