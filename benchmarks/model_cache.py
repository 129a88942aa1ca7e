"""Bytes that are fetched, and seconds from a pod's start to its engine's readiness, with and without the model cache.

A model of some 100 MB made at random, at a local hub that sends at most so many bytes per second; real vLLM on CPUs.
Pods are a first replica, a second one on the same node, and the one of the next job. Without a cache each has an empty
home, as a pod has; with it the time includes the container that fills the cache. Elapsed times: look at their
differences, which are those of the bytes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kuberoll_api.contract import CACHED_MODELS_VARIABLE
from tests.data.hub import Hub, serving_hub, variables

PODS = ("first replica", "second replica", "next job")
ENGINE = {"dtype": "bfloat16", "max_model_len": 512, "kv_cache_memory_bytes": 1 << 27}
SHAPE = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16}

PROGRAM = """
import asyncio, json, sys
from kuberoll_api.contract import ServeArgs
from kuberoll_workers.serving.engines.registry import engine_kind

async def main():
    args = ServeArgs(
        model="me/tiny", tokenizer="me/tiny", revision="main", engine="VLLM", engine_args=json.loads(sys.argv[1])
    )
    engine = engine_kind("VLLM").make(args)
    await engine.start()
    await engine.shutdown()

if __name__ == "__main__":
    asyncio.run(main())
"""
"""A replica's engine, from its process's start to its readiness, with its self-check and without Ray around it."""

FETCH = """
from huggingface_hub import snapshot_download
snapshot_download("me/tiny", revision="main")
"""
"""What an engine does before it loads a model of the hub."""


def make_model(directory: Path, layers: int) -> int:
    """Make the demo's model larger; return the bytes of its weights."""
    import torch
    from safetensors.torch import save_file

    path = directory / "config.json"
    config = {**json.loads(path.read_bytes()), **SHAPE, "num_hidden_layers": layers}
    path.write_text(json.dumps(config))
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    width = heads * config["head_dim"]
    shapes = {
        "self_attn.q_proj": (width, hidden),
        "self_attn.k_proj": (width, hidden),
        "self_attn.v_proj": (width, hidden),
        "self_attn.o_proj": (hidden, width),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    names = {f"model.layers.{layer}.{name}.weight": shape for layer in range(layers) for name, shape in shapes.items()}
    names |= {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    tensors = {
        name: torch.ones(shape, dtype=torch.bfloat16) if len(shape) == 1 else torch.randn(shape).to(torch.bfloat16) / 50
        for name, shape in names.items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return (directory / "model.safetensors").stat().st_size


def fill(hub: Hub, home: Path, cache: Path) -> Path:
    """Run the container that fills the cache; return the file with the places."""
    home.mkdir(exist_ok=True)
    result = home / "models.json"
    own = [f"--directory={cache}", f"--shown-at={cache}", f"--result={result}", "--model=me/tiny", "--revision=main"]
    command = [sys.executable, "-m", "kuberoll_workers.pods.models", *own]
    subprocess.run(command, env=variables(hub, home), check=True, stderr=subprocess.DEVNULL)
    return result


def start(hub: Hub, home: Path, cache: Path | None, *, engine: bool) -> tuple[float, float]:
    """Seconds until an engine is ready, and of these the seconds of the container before it.

    Args:
        engine: False: until the model's files are there.
    """
    began = time.perf_counter()
    environment = variables(hub, home)
    environment.pop(CACHED_MODELS_VARIABLE, None)
    if cache is not None:
        environment[CACHED_MODELS_VARIABLE] = str(fill(hub, home, cache))
    filled = time.perf_counter() - began
    command = [sys.executable, "-c", PROGRAM if engine else FETCH, json.dumps(ENGINE)]
    if cache is not None and not engine:
        return filled, filled
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began, filled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12, help="layers of the model; 12 are 100 MB")
    parser.add_argument("--megabytes-per-second", type=float, default=5.0, help="that the hub sends")
    parser.add_argument("--without-engine", action="store_true", help="only until the model's files are there")
    given = parser.parse_args()
    engine = not given.without_engine
    scratch = Path(tempfile.mkdtemp(prefix="kuberoll-bench-"))
    try:
        with serving_hub(scratch / "hub") as hub:
            size = make_model(hub.directory, given.layers)
            # So that imports are in the page cache for all.
            start(hub, scratch / "warm", None, engine=engine)
            hub.bytes_per_second = given.megabytes_per_second * 1e6
            print(f"a model of {size / 1e6:.0f} MB, {given.megabytes_per_second:g} MB/s")
            for cache in (None, scratch / "cache"):
                for number, pod in enumerate(PODS):
                    hub.sent = 0
                    ready, filled = start(hub, scratch / f"{number}-{cache is not None}", cache, engine=engine)
                    kind = "with a cache" if cache is not None else "without"
                    what = "ready" if engine else "there"
                    print(
                        f"{kind:12}  {pod:14}  {hub.sent / 1e6:6.1f} MB fetched  {what} after {ready:6.1f} s"
                        f"  of these {filled:5.1f} s before the engine",
                        flush=True,
                    )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
