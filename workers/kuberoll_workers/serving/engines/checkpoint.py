"""Checks that the weights in a directory fit a model, from the headers of their files."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from kuberoll_workers.serving.engines.interface import WeightsRefused

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors by name."""

_TENSORS = "*.safetensors"
_OTHERS = ("*.bin", "*.pt", "*.pth")
# A model whose output layer shares the embedding may be saved with or without it.
_TIED = "lm_head.weight"
# Names of layers that predict further tokens (MTP): of Qwen and others; and within those of DeepSeek and GLM, whose is
# one more of the model's layers.
_AHEAD = re.compile(r"(^|\.)mtp(_layers)?\.")
_AHEAD_LAYER = ".eh_proj."


def has_weights(path: Path) -> bool:
    """True if a directory has files with weights."""
    return any(any(path.glob(pattern)) for pattern in (_TENSORS, *_OTHERS))


def read_shapes(path: Path) -> Shapes | None:
    """Read the shapes of the tensors in a directory; None if the format has no header with them.

    Raises:
        WeightsRefused: A file is truncated or unreadable.
    """
    from safetensors import SafetensorError, safe_open

    shapes = {}
    for file in sorted(path.glob(_TENSORS)):
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    shapes[name] = tuple(tensors.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise WeightsRefused(f"{file}: {error}; was it written completely?") from error
    return shapes or None


def mismatch(new: Shapes, own: Shapes) -> str | None:
    """The first difference between tensors and those of a model; None: they match, or have another naming scheme.

    Args:
        new: The shapes to check.
        own: The shapes of the model's own tensors.
    """
    shared = new.keys() & own.keys()
    if not shared:
        return None
    for name in sorted(shared):
        if new[name] != own[name]:
            return f"{name} has the shape {new[name]}, but {own[name]} in the model"
    if missing := sorted(own.keys() - new.keys() - {_TIED} - _ahead(own)):
        return f"{missing[0]} is missing" + (f", and {len(missing) - 1} others are" if len(missing) > 1 else "")
    return None


def _ahead(names: Collection[str]) -> set[str]:
    """Those of layers that predict further tokens.

    transformers does not load them, so that trainers lack them, and vLLM only speculates with them: what is sampled
    does not depend on them.
    """
    layers = tuple(f"{name.partition(_AHEAD_LAYER)[0]}." for name in names if _AHEAD_LAYER in name)
    return {name for name in names if _AHEAD.search(name) or name.startswith(layers)}


def check_fit(path: Path, own: Path | None) -> None:
    """Check that the weights in a directory fit a model.

    Args:
        own: Directory of the model's own weights; None: unknown, so only the engine can check.

    Raises:
        WeightsRefused: They do not fit; the message names the first difference.
    """
    if not has_weights(path):
        raise WeightsRefused(f"{path} has no weights ({_TENSORS}); give the directory of a saved model")
    new = read_shapes(path)
    known = None if own is None else read_shapes(own)
    if new is not None and known is not None and (why := mismatch(new, known)) is not None:
        raise WeightsRefused(f"{path} does not fit the model: {why}")
