"""Where the cache of models has this pod's, which an init container has written down (`contract.CachedModels`)."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import IO

import msgspec

from kuberoll_api.contract import CACHED_MODELS_VARIABLE, CachedModel, CachedModels
from kuberoll_workers.data.model_cache.locks import hold

_log = logging.getLogger(__name__)

# As long as they are open, nobody removes the models. The system closes them with the process, however it ends.
_held: dict[str, IO[bytes]] = {}


class ModelGone(Exception):
    """A model was removed from the cache before an engine held it, and the engine cannot fetch it itself."""


def hold_models() -> None:
    """Keep the models of this pod in the cache as long as this process lives."""
    for model in _models():
        _hold(model)


def cached(source: str, *, tokenizer: bool = False) -> str | None:
    """The directory of a model in the cache, which keeps it as long as this process lives.

    Returns:
        None if the model is not cached: the engine takes it from where the job says.

    Raises:
        ModelGone: It was, and is of an object store.
    """
    for model in _models():
        if (model.source, model.tokenizer) != (source, tokenizer):
            continue
        if _hold(model) and Path(model.path).is_dir():
            return model.path
        if "://" in source:
            raise ModelGone(
                f"model {source}: the model cache has removed it, as this container had not run for a while: delete "
                "the pod, and the next one fetches it again"
            )
        _log.warning("model %s: the model cache has removed it; the engine fetches it itself", source)
    return None


def _models() -> list[CachedModel]:
    path = os.environ.get(CACHED_MODELS_VARIABLE)
    if not path:
        return []
    return msgspec.json.decode(Path(path).read_bytes(), type=CachedModels).models


def _hold(model: CachedModel) -> bool:
    """True if the model is there, and stays."""
    if model.held not in _held:
        held = hold(Path(model.held))
        if held is None:
            return False
        _held[model.held] = held
    return True
