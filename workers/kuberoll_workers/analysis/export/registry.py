"""Names of the export formats that are installed, from entry points: those of this distribution and of others."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Final

EXPORTS: Final = "kuberoll.exports"
"""Group of the entry points: `name = "package.module:FORMAT"`, with a `formats.Format` of this name."""

_PROJECT = Path(__file__).parents[4] / "pyproject.toml"


def installed() -> dict[str, EntryPoint]:
    """The entry points of formats by name, sorted; of two with one name ours, else that of the first distribution."""
    others = sorted(entry_points(group=EXPORTS), key=lambda entry: entry.dist.name if entry.dist else "", reverse=True)
    found = {entry.name: entry for entry in others}
    found |= {entry.name: entry for entry in others if entry.module.startswith(f"{__package__}.")}
    found |= {entry.name: entry for entry in _of_checkout()}
    return dict(sorted(found.items()))


def _of_checkout() -> Iterator[EntryPoint]:
    """Those of the checkout that this module is in: the metadata of an editable install are as old as the install."""
    if _PROJECT.is_file():
        project = tomllib.loads(_PROJECT.read_text("utf-8"))["project"]
        for name, value in project["entry-points"][EXPORTS].items():
            yield EntryPoint(name, value, EXPORTS)
