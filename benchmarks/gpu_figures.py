"""What a Linux machine with CUDA and no network can run: `python -m benchmarks.gpu_figures --out FILE` (make test-gpu).

It needs PyTorch 2.11 and transformers 5.17 or later, which the machine has, and the wheels that `make gpu-wheels`
fetched before. Each part stands for itself: one that fails is named with its error, and the others go on.

    engine    the demo's model in bfloat16 and float16: whether its KV transfer is proved, and whether its sketch is the
              CPU's but for rounding; how PyTorch computes attention (SDPA or FlashAttention)
    prefill   tokens a second by length and by prompts at once, of random models with the demo's shape
    export    when the first block of a prompt came out, as a share of its seconds, and what exporting added
    copies    from the device into pinned and into ordinary memory, GB/s; how much of an upload at 1 GB/s was hidden
    shapes    tokens a second of as many layers of qwen3-30B-A3B and gpt-oss-120b as fit, random weights in bfloat16;
              what did not fit is named
    a_class   200 prompts: prefill on the device, decode on the CPU, by Kvasir's own workers over their own queues

`ok`: every part ran, every proof and comparison held, every job's KV cache was used, and 0.9 of the upload was hidden.
It ends with 0 if so, with 1 if not, and with 2, saying so, where there is no CUDA device. What the figures do not show:
a store behind a network, any other engine, and answers of real models, since all weights but the demo's are random.
"""

import argparse
import importlib.util
import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

MINIMUM = {"torch": (2, 11), "transformers": (5, 17)}
HIDDEN_SHARE = 0.9


def why_not(device: str) -> str:
    """Why this can't run here, in one sentence; "": it can."""
    for package, lowest in MINIMUM.items():
        wanted = ".".join(map(str, lowest))
        if importlib.util.find_spec(package) is None:
            return f"no {package} is installed; {wanted} or later is needed"
        found = tuple(int(number) for number in re.findall(r"\d+", version(package))[:2])
        if found < lowest:
            return f"{package} {version(package)} is installed; {wanted} or later is needed"
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} finds no CUDA device here"
    return ""


def main() -> int:
    """All parts, one after the other, and one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/gpu.json"), help="the file (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="for all that is random (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if reason := why_not(arguments.device):
        print(f"gpu: {reason}. Nothing was run.", file=sys.stderr)
        return 2
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from benchmarks import gpu_parts

    found: dict[str, Any] = {"machine": gpu_parts.machine(arguments.device), "seed": arguments.seed, "failed": {}}
    with tempfile.TemporaryDirectory() as folder:
        bench = gpu_parts.Bench(arguments.device, arguments.seed, Path(folder))
        for name, part in gpu_parts.PARTS.items():
            found[name] = _outcome(name, part, bench, found["failed"])
            print(f"{name:8} {json.dumps(found[name])}", flush=True)
    found["ok"] = not found["failed"] and _is_well(found, arguments.device)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found))
    return 0 if found["ok"] else 1


def _outcome(name: str, part: Callable[[Any], Any], bench: Any, failed: dict[str, str]) -> Any:
    try:
        return part(bench)
    except Exception as error:  # noqa: BLE001  whatever a machine that nobody here has seen may raise
        traceback.print_exc()
        failed[name] = f"{type(error).__name__}: {error}"
        return None


def _is_well(found: dict[str, Any], device: str) -> bool:
    engines_agree = all(not row["why_no_kv"] and not row["sketch_differs"] for row in found["engine"])
    graded = found["a_class"]["verified"] == found["a_class"]["jobs"]
    # Where nothing is copied beside the computing, nothing can be hidden.
    return engines_agree and graded and (device == "cpu" or found["copies"]["hidden"] >= HIDDEN_SHARE)


if __name__ == "__main__":
    sys.exit(main())
