"""A quick BLAS for MLX on Linux without a GPU, for benchmarks with real weights.

MLX's wheel for such a machine brings the reference BLAS, which multiplies at 1 GFLOP/s on one core: a prompt of 1,023
tokens takes a model of 270 million parameters over two minutes. NumPy's wheel brings OpenBLAS, twenty times as fast on
two cores, under names of its own. `mlx_blas.c` gives it the name that MLX calls; all else is MLX's, as on a Mac. This
has to be loaded before MLX is, and only float32 goes through it.
"""

import ctypes
import importlib.util
import os
import sys
from pathlib import Path

import numpy as np

from tests.support import programs

SOURCE = Path(__file__).with_name("mlx_blas.c")


def load() -> bool:
    """Whether MLX, not imported yet, will multiply with it; False where MLX has another BLAS, or there is no gcc."""
    packages = Path(np.__file__).parents[1]
    libraries = sorted(packages.glob("numpy.libs/libscipy_openblas64_*.so"))
    if sys.platform != "linux" or not libraries or not any(packages.glob("mlx_cpu.libs/libblas*")):
        return False
    if importlib.util.find_spec("mlx") is None or "mlx.core" in sys.modules:
        return False
    try:
        shim = ctypes.CDLL(str(programs.compiled(SOURCE, "-shared", "-fPIC")), mode=os.RTLD_GLOBAL)
    except programs.ProgramMissing:
        return False
    product = ctypes.cast(ctypes.CDLL(str(libraries[0])).scipy_cblas_sgemm64_, ctypes.c_void_p)
    ctypes.c_void_p.in_dll(shim, "kvasir_product").value = product.value
    return True
