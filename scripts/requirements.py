"""Prints what the distribution needs for some of its extras, one requirement a line.

    python scripts/requirements.py workers s3

For image layers that hold the dependencies and not the code: they are built anew only when pyproject.toml changes.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def requirements(extras: list[str]) -> list[str]:
    """Requirements of the distribution with these extras.

    Raises:
        KeyError: There is no such extra.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *(line for name in extras for line in project["optional-dependencies"][name])]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
