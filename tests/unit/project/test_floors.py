"""pyproject.toml allows no release with a known advisory, and no click with which no command starts."""

import re
import tomllib

import pytest

from tests.support.processes import ROOT

# The first release that no advisory reaches which is fixed later, by November 2026; `make audit` looks up new ones.
FIRST_SOUND = {
    "aiohttp": "3.14.3",  # request smuggling by a WebSocket upgrade, CVE-2026-69243
    "certifi": "2024.7.4",  # roots of an authority that is trusted no more
    "click": "8.4",  # 8.3.3: CVE-2026-7246; up to there ParamType can't be given a type, and every command ended
    "h11": "0.16",  # chunks that end as no chunk ends, CVE-2025-43859
    "jinja2": "3.1.6",  # out of the sandbox by |attr, CVE-2025-27516
    "msgpack": "1.2.3",  # memory is lost with each map that has a refused key, CVE-2026-114613
    "pillow": "13",  # the JPEG decoder wrote beyond its buffer
    "pygments": "2.20",  # CVE-2026-4539
    "python-multipart": "0.0.30",  # quadratic time, CVE-2026-53539
    "starlette": "1.3.1",  # 0.49.1: Range, CVE-2025-62727; 1.0.1: Host, CVE-2026-48710; forms, CVE-2026-54283
    "streamlit": "1.54",  # CVE-2026-33682
    "transformers": "5.3",  # a configuration that has its own code run, CVE-2026-5241
}
_REQUIREMENT = re.compile(r"([\w-]+)(?:\[[\w,-]+\])?(?:[>=]=([\d.]+))?")


def _named() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    words = [*project["dependencies"], *(word for name in extras if name != "dev" for word in extras[name])]
    matches = [match for word in words if (match := _REQUIREMENT.match(word))]
    return {match[1].lower(): match[2] or "" for match in matches}


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@pytest.mark.parametrize("name", FIRST_SOUND)
def test_a_floor_excludes_releases_with_advisories(name: str) -> None:
    assert _number(_named()[name]) >= _number(FIRST_SOUND[name])


def test_whatever_is_asked_for_has_a_floor() -> None:
    """But for MLX, which mlx-lm chooses."""
    assert [name for name, floor in _named().items() if not floor] == ["mlx"]
