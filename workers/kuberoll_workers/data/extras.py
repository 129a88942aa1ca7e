"""Extras of KubeRoll that bring packages which only some runs need."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Final

EXTRAS: Final[Mapping[str, str]] = {
    "adlfs": "azure",
    "cryptography": "sandboxes",
    "datasets": "huggingface",
    "docker": "sandboxes",
    "gcsfs": "gcs",
    "mlflow": "tracking",
    "s3fs": "s3",
    "wandb": "tracking",
}
"""The extra that brings a package, by the name under which it is imported."""

_STORES: Final = {"abfs": "adlfs", "abfss": "adlfs", "az": "adlfs", "gcs": "gcsfs", "gs": "gcsfs", "s3": "s3fs"}


def installation(package: str) -> str:
    """Command that installs a package: with the extra that brings it, if there is one."""
    extra = EXTRAS.get(package)
    return f"pip install {package}" if extra is None else f"pip install 'kuberoll[{extra}]'"


def unusable_store(uri: str, error: ImportError | ValueError) -> str:
    """Say why fsspec cannot open a URI: its kind is unknown, or a package is missing, with what installs it.

    Args:
        error: What importing fsspec, or opening the URI with it, raised.
    """
    scheme = uri.partition("://")[0]
    package = _package_of(scheme) if isinstance(error, ImportError) else ""
    if not package or importlib.util.find_spec(package) is not None:
        return str(error.__cause__ or error)
    return f"{scheme}:// needs {package}, which is not installed here: {installation(package)}"


def _package_of(scheme: str) -> str:
    """Package that reads URIs with this scheme; empty if none is known, or fsspec itself does."""
    if scheme in _STORES:
        return _STORES[scheme]
    try:
        from fsspec.registry import known_implementations
    except ImportError:
        return "fsspec"
    package = str(known_implementations.get(scheme, {}).get("class", "")).partition(".")[0]
    return "" if package == "fsspec" else package
