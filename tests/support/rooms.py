"""The rooms of the house: the packages that pyproject.toml puts into the wheel."""

import tomllib

from tests.support.processes import ROOT

_SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
ROOMS = tuple(pattern.removesuffix("*") for pattern in _SETUPTOOLS["packages"]["find"]["include"])
