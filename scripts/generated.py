"""Files that are made from code: `make crd` writes them, and tests run the same scripts with `--check`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]


def write_or_check(files: Mapping[Path, str]) -> None:
    """Write the files that are stale; with `--check` on the command line name them instead, and exit with 1 if any is.

    Args:
        files: What each path is to hold.
    """
    stale = {path: text for path, text in files.items() if not path.is_file() or path.read_text() != text}
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale: run make crd")
        sys.exit(bool(stale))
    for path, text in stale.items():
        path.write_text(text)
