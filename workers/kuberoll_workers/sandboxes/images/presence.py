"""Whether images are there, as far as this machine's own files tell."""

from __future__ import annotations

import functools

from kuberoll_workers.sandboxes.images.archives import ArchiveSource
from kuberoll_workers.sandboxes.images.errors import ImageError
from kuberoll_workers.sandboxes.images.layouts import LayoutSource
from kuberoll_workers.sandboxes.images.references import ArchiveReference, LayoutReference, parse


@functools.lru_cache(maxsize=65_536)
def absence(reference: str) -> str | None:
    """Why an image cannot be had from a layout or an archive; None: it can, or a registry would have to be asked."""
    try:
        named = parse(reference)
        if isinstance(named, LayoutReference):
            LayoutSource(named).find()
        elif isinstance(named, ArchiveReference):
            ArchiveSource(named).find()
    except ImageError as error:
        return str(error)
    return None
