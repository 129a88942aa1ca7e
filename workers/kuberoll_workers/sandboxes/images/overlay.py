"""Layers on top of each other: what to mount an overlay with.

`mount(2)` takes a page of options, and each layer is named in them: 127 layers, as many as images have in practice,
fit only as short names that are relative to the directory of the caller.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kuberoll_workers.sandboxes.images.errors import ImageRefused

MAX_OPTIONS: Final = 4095
"""Bytes of options that `mount(2)` takes: a page, with the zero at its end."""
MAX_LAYERS: Final = 500
"""Layers that overlayfs takes: OVL_MAX_STACK of the kernel."""


@dataclass(frozen=True, slots=True)
class OverlayMount:
    """How to mount an overlay: `mount("overlay", target, "overlay", flags, options)`.

    Attributes:
        directory: Where the caller must be (`chdir`) when it mounts: names in the options are relative to it.
    """

    directory: Path
    options: str


def overlay_options(layers: Sequence[Path], upper: Path | None = None, work: Path | None = None) -> OverlayMount:
    """What to mount layers with.

    Whoever mounts gives `upper` the mode 0755 and the machine's root as its owner: the overlay's root has these.

    Args:
        layers: Directories, lowest first.
        upper: Directory that gets what is written; None: nothing can be.
        work: Empty directory on the same file system, for the kernel.

    Raises:
        ImageRefused: There are too many.
    """
    if not layers:
        raise ValueError("an overlay has layers")
    if len(layers) > MAX_LAYERS:
        raise ImageRefused(f"{len(layers)} layers; overlayfs takes {MAX_LAYERS}: squash the image (--squash)")
    directory = Path(os.path.commonpath([path.parent for path in layers]))
    lower = ":".join(_escaped(str(path.relative_to(directory)), "\\:,") for path in reversed(layers))
    options = f"userxattr,lowerdir={lower}"
    if upper is not None and work is not None:
        above, scratch = (_escaped(str(path), "\\,") for path in (upper, work))
        options += f",upperdir={above},workdir={scratch}"
    if (size := len(os.fsencode(options))) > MAX_OPTIONS:
        raise ImageRefused(
            f"{len(layers)} layers take {size} bytes of mount options, and a mount has {MAX_OPTIONS}: squash the image "
            "(--squash), or give machines a directory with a shorter name"
        )
    return OverlayMount(directory, options)


def _escaped(text: str, special: str) -> str:
    return "".join(f"\\{character}" if character in special else character for character in text)
