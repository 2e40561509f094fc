"""Says, as JSON, which packages of the peers an interpreter has, without importing any of them.

Relies on the standard library alone, since the interpreter may lack everything else.
"""

from __future__ import annotations

import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version


def main(packages: list[str]) -> None:
    """Write the versions of those of `packages` that are installed, and that of Python, to standard output."""
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    json.dump({"python": platform.python_version(), "packages": versions}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
