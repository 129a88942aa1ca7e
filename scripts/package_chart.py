"""Lint the Helm chart and package it: what `helm lint --strict` and `helm package` do, by Helm's own library.

    python scripts/package_chart.py DIRECTORY

Prints the path of the package. The exit code is 1 if the chart has an error or a warning.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import helm_python

CHART: Final = Path(__file__).resolve().parents[1] / "charts" / "kuberoll"
_WARNING: Final = 2


def findings(report: dict[str, Any]) -> list[str]:
    """The errors and warnings of a lint report, one line each; hints such as a recommended icon are left out."""
    messages = [f"{item['path']}: {item['error']}" for item in report["messages"] if item["severity"] >= _WARNING]
    return [*report["errors"], *(line for line in messages if not any(line in error for error in report["errors"]))]


def main(directory: Path) -> int:
    if found := findings(helm_python.lint(CHART, strict=True)):
        print("\n".join(found), file=sys.stderr)
        return 1
    directory.mkdir(parents=True, exist_ok=True)
    print(helm_python.package(CHART, destination=directory))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
