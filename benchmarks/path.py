"""How much code each room has, and all of them together.

    statements    of all modules of a room, and under "all" of the product: every ast.stmt, nested ones too, docstrings
                  excepted

Statements depend neither on how lines are broken nor on comments. What the figure does not show is how hard the code is
to read, nor how much of it one job runs through: docs/explanation/one_job.md tells that. Neither the seed nor
`--quick` changes anything.
"""

import ast
import sys
from pathlib import Path

from benchmarks import harness
from tests.support.rooms import ROOMS

ROOT = Path(__file__).resolve().parents[1]
_BODIES = ("body", "orelse", "handlers", "finalbody", "cases")


def statements(folder: Path) -> int:
    """Statements of all modules below a folder, nested ones too, docstrings excepted."""
    return sum(_statements(ast.parse(path.read_text("utf-8"))) for path in folder.rglob("*.py"))


def _statements(node: ast.AST) -> int:
    """Those in a node's bodies. Expressions hold none, and are not gone through: they are most of a tree."""
    below = [each for name in _BODIES if isinstance(body := getattr(node, name, None), list) for each in body]
    return sum(isinstance(each, ast.stmt) + _statements(each) for each in below) - _has_docstring(node)


def _has_docstring(node: ast.AST) -> bool:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return ast.get_docstring(node, clean=False) is not None


def main() -> int:
    """Count, and end with the line of JSON."""
    harness.options(__doc__)
    found = {room: statements(ROOT / room) for room in ROOMS}
    found["all"] = sum(found.values())
    print("\n".join(f"{room:16}{number:8,}" for room, number in found.items()))
    harness.finish(statements=found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
