"""Ways of weights to a real engine: bytes, seconds until it serves them, and for how long it generates nothing.

Run it: `python -m benchmarks.weight_transports tiny` and `python -m benchmarks.weight_transports random`.

One engine, vLLM on this machine's CPU or GPU, generates for four callers all the time. A trainer in the same process
publishes steps by each transport, as `Publisher` does: what it writes or copies, and what the engine then does. `tiny`
is examples/models/tiny-policy. `random` is a Llama of 0.13 G random parameters in bfloat16, or of 1.3 G with
`--width 2048 --layers 24`. Each step changes 3 % of the elements by their smallest step.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from kuberoll.trainer import Broadcast, Deltas, Files
from kuberoll.trainer.locations import open_location
from kuberoll.trainer.transports import Transport, describe
from kuberoll_workers.data.messages import token_array
from kuberoll_workers.policy.interface import GenerationRequest, SamplingParameters
from kuberoll_workers.serving.engines.vllm_engine import VLLMEngine

TINY = Path(__file__).parents[1] / "examples" / "models" / "tiny-policy"
STEPS = {"tiny": 4, "random": 3}
CALLERS = 4
TOKENS = 64


class TimedEngine(VLLMEngine):
    """Notes how long each change of its weights keeps it from generating."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.pauses: list[float] = []

    @asynccontextmanager
    async def _switching(self, version: str) -> AsyncIterator[None]:
        began = time.perf_counter()
        async with super()._switching(version):
            yield
        self.pauses.append(time.perf_counter() - began)


def random_model(place: Path, width: int, layers: int) -> None:
    """Write a model with heads of 64 dimensions, as one file."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=width,
        intermediate_size=8 * width // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(place, max_shard_size="100GB")


def change(state: dict[str, torch.Tensor], step: int) -> None:
    """Change 3 % of the elements."""
    draw = torch.Generator().manual_seed(step)
    for value in state.values():
        bits = value.view(torch.int16 if value.element_size() == 2 else torch.int32).view(-1)
        bits[torch.randint(bits.numel(), (3 * bits.numel() // 100,), generator=draw)] += 1


async def busy(engine: VLLMEngine, caller: int) -> None:
    """Generate one response after the other."""
    for number in range(1_000_000):
        name = f"{caller}-{number}"
        await engine.generate(
            GenerationRequest(
                request_id=name,
                session_id=name,
                token_ids=token_array(range(5, 69)),
                sampling=SamplingParameters(max_tokens=TOKENS, min_tokens=TOKENS, seed=number),
            )
        )


async def measure(
    engine: TimedEngine, transport: Transport, state: dict[str, torch.Tensor], place: Path, versions: range
) -> dict[str, list[float]]:
    """Publish the steps; numbers by name, one for each step after the first, which is whole in every transport."""
    location = open_location(place)
    transport.reach("http://127.0.0.1:80")
    numbers: dict[str, list[float]] = {"bytes": [], "publish": [], "serve": [], "pause": []}
    for version in versions:
        change(state, version)
        began = time.perf_counter()
        with location.writing(), location.workspace(version) as target:
            write = asyncio.to_thread(transport.write, state, version=version, dtype=None, target=target)
            manifest = describe(await write, target)
            await asyncio.to_thread(location.commit, version, target)
        size = sum(manifest.files.values()) + transport.direct_bytes()
        uri = transport.address(version, location.uri(version), replicas=1)
        published = time.perf_counter() - began
        began = time.perf_counter()
        await engine.load_weights(uri, str(version))
        served = time.perf_counter() - began
        if version > versions[0]:
            for name, value in zip(numbers, (size, published, served, engine.pauses[-1]), strict=True):
                numbers[name].append(value)
    transport.close()
    return numbers


async def run(model: Path, dtype: str, steps: int) -> None:
    from safetensors.torch import load_file

    state: dict[str, torch.Tensor] = load_file(model / "model.safetensors")
    count = sum(value.numel() for value in state.values())
    print(f"{count / 1e6:.1f} M parameters, {sum(value.nbytes for value in state.values()) / 1e6:.1f} MB", flush=True)
    engine = TimedEngine(
        model=str(model),
        tokenizer=str(TINY),
        revision=None,
        engine_args={
            "dtype": dtype,
            "max_model_len": 512,
            "kv_cache_memory_bytes": 1 << 28,
            "skip_tokenizer_init": True,
            "weight_transfer_config": {"backend": "gloo"},
        },
    )
    await engine.start()
    callers = [asyncio.create_task(busy(engine, caller)) for caller in range(CALLERS)]
    try:
        transports: list[tuple[str, Transport]] = [
            ("files", Files()),
            ("broadcast", Broadcast()),
            ("deltas", Deltas(anchor_every=1000)),
        ]
        for number, (name, transport) in enumerate(transports):
            with tempfile.TemporaryDirectory(prefix="kuberoll-transports-") as place:
                found = await measure(
                    engine, transport, state, Path(place), range(100 * number + 1, 100 * number + steps + 2)
                )
            middle = {key: statistics.median(values) for key, values in found.items()}
            print(
                f"  {name:9s} {middle['bytes'] / 1e6:8.2f} MB  publish {middle['publish']:6.3f} s  "
                f"then served after {middle['serve']:6.3f} s (max {max(found['serve']):.3f})  "
                f"of which paused {middle['pause']:6.3f} s (max {max(found['pause']):.3f})",
                flush=True,
            )
    finally:
        for task in callers:
            task.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        await engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["tiny", "random"])
    parser.add_argument("--width", type=int, default=768, help="of the random model, a multiple of 64")
    parser.add_argument("--layers", type=int, default=12)
    arguments = parser.parse_args()
    if arguments.model == "tiny":
        asyncio.run(run(TINY, "float32", STEPS["tiny"]))
        return
    with tempfile.TemporaryDirectory(prefix="kuberoll-model-") as place:
        model = Path(place)
        # On GPUs vLLM forks its engine: one that is forked from a process whose threads have computed never starts.
        making = get_context("spawn").Process(target=random_model, args=(model, arguments.width, arguments.layers))
        making.start()
        making.join()
        if making.exitcode:
            raise SystemExit(f"the model was not made: exit code {making.exitcode}")
        asyncio.run(run(model, "bfloat16", STEPS["random"]))


if __name__ == "__main__":
    main()
