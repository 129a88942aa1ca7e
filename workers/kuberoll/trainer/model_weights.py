"""The weights of a model as bits: of a module, a state dict, or a directory."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy

from kuberoll_workers.data.weights.tensors import (
    Tensor,
    UnusableWeights,
    bits_type,
    dtype_named,
    read_directory,
)

FLOATS = ("bfloat16", "float16", "float32")
# Parts of names that come from wrappers: FSDP, torch.compile, activation checkpoints; DistributedDataParallel's is the
# first part.
_WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")
_PARALLEL = "module."
_OUTPUT_LAYER = "lm_head.weight"
# PEFT's name of a layer that has an adapter.
_ADAPTED = "base_layer"


def full_state(model: Any) -> dict[str, Any]:
    """The state dict of a module, or of a mapping, with whole tensors in place of shards, and names as in files.

    Call it on all ranks: shards are gathered from all of them. Publish what it returns on one rank.
    """
    return _as_saved(model, {name: _whole(value) for name, value in _state_of(model).items()})


def model_tensors(weights: Any, *, dtype: str | None) -> dict[str, Tensor]:
    """Read weights as bits. Tensors on the CPU are not copied if their memory has them in order.

    Args:
        weights: A torch module, a mapping from names to torch tensors or numpy arrays, or the path of a directory with
            *.safetensors.
        dtype: Type for floating-point torch tensors, one of `FLOATS`; None: as they are.

    Raises:
        UnusableWeights: One is sharded over several ranks, on no device, sparse or quantized, has a type that
            safetensors lacks, or has a LoRA adapter beside it; the message names it.
    """
    if dtype is not None and dtype not in FLOATS:
        raise UnusableWeights(f"dtype: found {dtype!r}; use one of {', '.join(FLOATS)}, or None")
    if isinstance(weights, str | Path):
        found: dict[str, Tensor] = read_directory(Path(weights))
        if dtype is not None and (odd := [name for name, one in found.items() if _differs(one, dtype)]):
            raise UnusableWeights(
                f"{weights}: {odd[0]} is {found[odd[0]].dtype}, and files are published as they are: leave out dtype"
            )
        return found
    state = _as_saved(weights, {name: _of_one_rank(name, value) for name, value in _state_of(weights).items()})
    tensors = {}
    for name, value in state.items():
        if _ADAPTED in name.split("."):
            raise UnusableWeights(
                f"{name} has a LoRA adapter beside it: publish the adapter, with transport='adapters', or a copy of "
                "the model with the adapter in its weights: copy.deepcopy(model).merge_and_unload()"
            )
        if (bits := _bits_of(name, value, dtype)) is not None:
            tensors[name] = bits
    if not tensors:
        raise UnusableWeights("weights: found no tensors; give a module, its state dict, or a directory")
    if _is_tied(state):
        # Replicas take the embedding; with a layer that is stored twice every file would be larger.
        del tensors[_OUTPUT_LAYER]
    return tensors


def _state_of(weights: Any) -> dict[str, Any]:
    state = weights.state_dict() if hasattr(weights, "state_dict") else weights
    if not isinstance(state, Mapping):
        raise UnusableWeights(
            f"weights: found {type(weights).__name__}; give a torch module, a state dict, or a directory with "
            "*.safetensors"
        )
    return {_plain_name(str(name)): value for name, value in state.items()}


def _plain_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS).removeprefix(_PARALLEL)


def _as_saved(model: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Tensors of a transformers model as its files have them: in memory, experts of a layer may be one tensor."""
    inner = model
    while (wrapped := getattr(inner, "_orig_mod", getattr(inner, "module", None))) is not None:
        inner = wrapped
    # Where there is such a model the package has been imported.
    loading = sys.modules.get("transformers.core_model_loading")
    if loading is None or not hasattr(inner, "save_pretrained") or not hasattr(inner, "config"):
        return state
    saved: dict[str, Any] = loading.revert_weight_conversion(inner, state)
    return saved


def _of_one_rank(name: str, value: Any) -> Any:
    if _is_sharded(value) and value.device_mesh.size() > 1:
        raise UnusableWeights(
            f"{name} is sharded over {value.device_mesh.size()} ranks: call kuberoll.trainer.full_state(model) on "
            "all of them, and publish what it returns on one"
        )
    return _whole(value)


def _is_sharded(value: Any) -> bool:
    return hasattr(value, "full_tensor") and hasattr(value, "device_mesh")


def _whole(value: Any) -> Any:
    return value.full_tensor() if _is_sharded(value) else value


def _bits_of(name: str, value: Any, dtype: str | None) -> Tensor | None:
    """The bits of a tensor; None: it is none, such as the extra state of a module."""
    if isinstance(value, numpy.ndarray | numpy.generic):
        return _bits_of_array(name, numpy.asarray(value), dtype)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return None
    value = value.detach()
    if value.is_quantized or value.layout != torch.strided:
        raise UnusableWeights(f"{name} is sparse or quantized: publish the weights that it was made of")
    if value.is_meta:
        raise UnusableWeights(f"{name} is on the device meta, without values: load the weights first")
    if dtype is not None and value.is_floating_point():
        value = value.to(getattr(torch, dtype))
    kind = dtype_named(str(value.dtype).removeprefix("torch."), where=name)
    flat = value.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return Tensor(kind, tuple(value.shape), flat.view(torch.uint8).numpy().view(bits_type(kind)))


def _bits_of_array(name: str, value: Any, dtype: str | None) -> Tensor:
    if dtype is not None and value.dtype.kind == "f" and value.dtype.name != dtype:
        raise UnusableWeights(
            f"{name} is a numpy array of {value.dtype.name}; only torch tensors are converted to {dtype}"
        )
    kind = dtype_named(value.dtype.name, where=name)
    plain = numpy.ascontiguousarray(value).astype(value.dtype.newbyteorder("<"), copy=False)
    return Tensor(kind, tuple(value.shape), plain.reshape(-1).view(bits_type(kind)))


def _differs(tensor: Tensor, dtype: str) -> bool:
    return tensor.dtype in ("F16", "BF16", "F32", "F64") and tensor.dtype != dtype_named(dtype, where="dtype")


def _is_tied(state: Mapping[str, Any]) -> bool:
    """True if the output layer is the embedding, as the same memory."""
    output = state.get(_OUTPUT_LAYER)
    if output is None or not hasattr(output, "data_ptr"):
        return False
    return any(
        name != _OUTPUT_LAYER
        and hasattr(value, "data_ptr")
        and value.data_ptr() == output.data_ptr() != 0
        and value.shape == output.shape
        and value.stride() == output.stride()
        for name, value in state.items()
    )
