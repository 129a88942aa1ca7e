"""Weights of modules, state dicts and directories, bit by bit, and what cannot be published."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from kuberoll.trainer import UnusableWeights, full_state
from kuberoll.trainer.model_weights import model_tensors
from kuberoll_workers.data.weights.tensors import write_file

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow


class Tied(torch.nn.Module):  # type: ignore[misc, name-defined]
    """An embedding that is the output layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.lm_head = torch.nn.Linear(3, 5, bias=False)
        self.lm_head.weight = self.embed.weight


def loaded(weights: Any, path: Path, dtype: str | None = None) -> dict[str, Any]:
    """What PyTorch reads of the file that is written."""
    from safetensors.torch import load_file

    write_file(path, model_tensors(weights, dtype=dtype))
    return dict(load_file(path))


def test_tensors_of_every_kind_of_memory_are_read_in_their_order(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(1)
    state = {
        f"{dtype}": torch.randn(4, 6, generator=draw).to(dtype)
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.int8)
    }
    whole = torch.randn(8, 6, generator=draw)
    state |= {"transposed": whole.t(), "part": whole[::2, 1:], "scalar": torch.tensor(2.5), "none": whole[:0]}
    state |= {
        "parameter": torch.nn.Parameter(whole),
        "flags": whole > 0,
        "negative": torch.imag(torch.conj(whole + 1j)),
    }
    state["nan"] = torch.tensor([0x7FC1, -1, -32768], dtype=torch.int16).view(torch.bfloat16)
    found = loaded(state, tmp_path / "x.safetensors")
    assert found.keys() == state.keys()
    for name, value in state.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert found[name].reshape(-1).view(torch.uint8).tolist() == (
            value.detach().resolve_neg().contiguous().reshape(-1).view(torch.uint8).tolist()
        )


def test_an_output_layer_that_is_the_embedding_is_stored_once(tmp_path: Path) -> None:
    assert loaded(Tied(), tmp_path / "x.safetensors").keys() == {"embed.weight"}
    untied = Tied()
    untied.lm_head.weight = torch.nn.Parameter(untied.embed.weight.detach().clone())
    assert model_tensors(untied, dtype=None).keys() == {"embed.weight", "lm_head.weight"}


def test_wrappers_do_not_change_names_and_floats_are_converted(tmp_path: Path) -> None:
    weights = torch.tensor([1 / 3, -2 / 3])
    found = loaded({"_orig_mod.embed.weight": weights}, tmp_path / "x.safetensors", "bfloat16")
    assert torch.equal(found["embed.weight"], weights.bfloat16())
    whole = torch.zeros(1)
    state = {"module._fsdp_wrapped_module.a.module.b": whole, "module.steps": whole.long()}
    found = loaded(state, tmp_path / "x.safetensors", "float16")
    assert {name: value.dtype for name, value in found.items()} == {
        "a.module.b": torch.float16,
        "steps": torch.int64,
    }


def test_a_transformers_model_has_the_tensors_of_its_files(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"vocab_size": 16, "hidden_size": 8, "moe_intermediate_size": 4, "num_hidden_layers": 2, "head_dim": 4}
    config = Qwen3MoeConfig(
        num_attention_heads=2, num_key_value_heads=2, num_experts=3, tie_word_embeddings=True, **sizes
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "model")
    files = model_tensors(tmp_path / "model", dtype=None)
    # In memory all experts of a layer are one tensor.
    assert "model.layers.1.mlp.experts.2.up_proj.weight" in files
    for model in (Qwen3MoeForCausalLM(config), Qwen3MoeForCausalLM.from_pretrained(tmp_path / "model")):
        model.load_state_dict(Qwen3MoeForCausalLM.from_pretrained(tmp_path / "model").state_dict())
        for weights in (model, torch.nn.DataParallel(model), torch.compile(model), full_state(model)):
            found = model_tensors(weights, dtype=None)
            assert found.keys() == files.keys()
            for name, tensor in files.items():
                assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
                assert found[name].bits.tolist() == tensor.bits.tolist()


def test_an_adapter_is_not_published_as_a_model() -> None:
    from peft import LoraConfig, get_peft_model

    class Small(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(2, 3)

    adapted = get_peft_model(Small(), LoraConfig(r=1, target_modules=["up"]))
    with pytest.raises(UnusableWeights, match=r"up\.base_layer\.weight has a LoRA adapter .* transport='adapters'"):
        model_tensors(adapted, dtype=None)
    assert model_tensors(adapted.merge_and_unload(), dtype=None).keys() == {"up.weight", "up.bias"}


@pytest.fixture
def mesh() -> Iterator[Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_shards_of_one_rank_are_whole(mesh: Any, tmp_path: Path) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    value = torch.arange(6.0).reshape(3, 2)
    sharded = {"a": distribute_tensor(value, mesh, [Shard(0)])}
    assert torch.equal(loaded(sharded, tmp_path / "x.safetensors")["a"], value)
    assert torch.equal(full_state(sharded)["a"], value)


class TwoRanks:
    """The part of a device mesh that is asked for."""

    def size(self) -> int:
        return 2


def test_what_cannot_be_published_is_named(tmp_path: Path) -> None:
    elsewhere = torch.zeros(2)
    elsewhere.full_tensor, elsewhere.device_mesh = None, TwoRanks()
    for value, words in [
        (torch.zeros(2, device="meta"), "x is on the device meta"),
        (torch.zeros(2, 2).to_sparse(), "x is sparse or quantized"),
        (torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8), "x is sparse or quantized"),
        (torch.zeros(2, dtype=torch.complex128), "x: weights of type complex128"),
        (elsewhere, r"x is sharded over 2 ranks: call kuberoll.trainer.full_state"),
        (numpy.array(["a"]), "x: weights of type str"),
    ]:
        with pytest.raises(UnusableWeights, match=words):
            model_tensors({"x": value}, dtype=None)
    for weights, dtype, words in [
        ({}, None, "found no tensors"),
        ({"x": "extra state"}, None, "found no tensors"),
        (7, None, "found int"),
        (tmp_path, None, "give the directory of a saved model"),
        ({"x": numpy.zeros(2, numpy.float32)}, "bfloat16", "only torch tensors are converted"),
    ]:
        with pytest.raises(UnusableWeights, match=words):
            model_tensors(weights, dtype=dtype)
    loaded({"x": torch.zeros(2)}, tmp_path / "x.safetensors")
    with pytest.raises(UnusableWeights, match="x is F32, and files are published as they are"):
        model_tensors(tmp_path, dtype="bfloat16")
