"""Runs every benchmark in turn: `python -m benchmarks [--quick]`."""

import pkgutil
import subprocess
import sys

import benchmarks


def main() -> int:
    """Each benchmark in a process of its own; 0 if all of them ended well."""
    modules = {module.name for module in pkgutil.iter_modules(benchmarks.__path__)}
    names = sorted(name for name in modules - {"harness"} if "_" not in name)
    failed = []
    for name in names:
        print(f"\n== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *sys.argv[1:]], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
