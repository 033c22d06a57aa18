"""Puts the demo's model and class into the wheel, from the one place where they are kept: examples/.

Everything else about the package stands in pyproject.toml.
"""

from pathlib import Path
from shutil import copyfile

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
DEMO = (
    "demo.toml",
    "model/kvasir-demo.gguf",
    "homework/*.yaml",
    "homework/*.ipynb",
    "homework/*.csv",
    "homework/expected.json",
)


class BuildWithDemo(build_py):
    """A checkout has the files beside the package; an installed package has them in kvasir/demo_files."""

    def run(self) -> None:
        """Build, then copy."""
        super().run()
        if self.editable_mode:
            return
        examples = HERE / "examples"
        files = [path for pattern in DEMO for path in examples.glob(pattern)]
        files += [path for path in (examples / "homework/submissions").rglob("*") if path.is_file()]
        for path in files:
            target = Path(self.build_lib, "kvasir/demo_files", path.relative_to(examples))
            self.mkpath(str(target.parent))
            copyfile(path, target)


setup(cmdclass={"build_py": BuildWithDemo})
