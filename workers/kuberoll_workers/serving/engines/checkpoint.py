"""Whether a directory holds weights that fit a model, judged by what the files say of themselves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kuberoll_workers.serving.engines.interface import WeightsRefused

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors by name."""

_TENSORS = "*.safetensors"
_OTHERS = ("*.bin", "*.pt", "*.pth")
# A model whose output layer is its embedding may be saved with or without it.
_TIED = "lm_head.weight"


def has_weights(path: Path) -> bool:
    """Whether a directory has files of weights."""
    return any(any(path.glob(pattern)) for pattern in (_TENSORS, *_OTHERS))


def read_shapes(path: Path) -> Shapes | None:
    """The tensors of a directory's files; None where they are in a format that does not say.

    Raises:
        WeightsRefused: A file is torn.
    """
    from safetensors import SafetensorError, safe_open

    found = {}
    for file in sorted(path.glob(_TENSORS)):
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                    found[name] = tuple(tensors.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise WeightsRefused(f"{file}: {error}; is it written completely?") from error
    return found or None


def mismatch(new: Shapes, own: Shapes) -> str | None:
    """Why tensors are not those of a model; None: they are, or they are named by another scheme.

    Args:
        own: The tensors that the model was started with.
    """
    shared = new.keys() & own.keys()
    if not shared:
        return None
    for name in sorted(shared):
        if new[name] != own[name]:
            return f"{name} has the shape {new[name]}, in the model it is {own[name]}"
    if missing := sorted(own.keys() - new.keys() - {_TIED}):
        return f"{missing[0]} is missing" + (f", and {len(missing) - 1} others are" if len(missing) > 1 else "")
    return None


def check_fit(path: Path, own: Path | None) -> None:
    """Refuse a directory whose weights are not those of a model.

    Args:
        own: Where the model's own are; None: nobody knows, so that only the engine can tell.

    Raises:
        WeightsRefused: Says what does not fit.
    """
    if not has_weights(path):
        raise WeightsRefused(f"{path} holds no weights ({_TENSORS}); name the directory of a saved model")
    new = read_shapes(path)
    known = None if own is None else read_shapes(own)
    if new is not None and known is not None and (why := mismatch(new, known)) is not None:
        raise WeightsRefused(f"{path} does not fit the model: {why}")
