"""Publishing of weights: bytes and seconds of changes against whole files, over 20 steps of training.

Run it: `python -m benchmarks.weights tiny` and `python -m benchmarks.weights random --parameters 1e9`.

Weights are what a trainer with float32 masters serves: masters rounded to bfloat16. `tiny` takes steps of AdamW with
examples/models/tiny-policy, on random tokens. `random` has masters that are drawn from N(0, 0.02), and adds to each
in each step a number from N(0, 1) times the learning rate: Adam's steps are of about that size. One drawing of 64 Mi
numbers serves all tensors of a step, each turned by another offset. Whole files are measured over 4 steps.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kuberoll.trainer.locations import open_location
from kuberoll.trainer.transports import Deltas, Files, Transport, describe
from kuberoll_workers.data.weights.tensors import digest_of, read_directory
from kuberoll_workers.serving.engines.fetching import fetch

TINY = Path(__file__).parents[1] / "examples" / "models" / "tiny-policy"
STEPS = 20
# As wide as a layer of a model of a billion parameters.
COLUMNS = 8192


def tiny_steps(rate: float) -> Iterator[dict[str, Any]]:
    """State dicts of the tiny policy, the first before any step."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(STEPS + 1):
        yield {name: value.detach().bfloat16() for name, value in model.named_parameters()}
        ids = torch.randint(0, model.config.vocab_size, (8, 64))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def random_steps(parameters: int, rate: float) -> Iterator[dict[str, Any]]:
    """State dicts of random weights in tensors of 64 Mi elements, the first before any step."""
    draw = torch.Generator().manual_seed(0)
    rows = 8192
    count = max(1, parameters // (rows * COLUMNS))
    masters = {f"layers.{number}.weight": torch.empty(rows, COLUMNS) for number in range(count)}
    for master in masters.values():
        master.normal_(0.0, 0.02, generator=draw)
    step = torch.empty(rows, COLUMNS)
    for _ in range(STEPS + 1):
        yield {name: master.bfloat16() for name, master in masters.items()}
        step.normal_(generator=draw)
        for number, master in enumerate(masters.values()):
            master.add_(step.roll(97 * number, 0), alpha=rate)


def measure(transport: Transport, steps: Iterator[dict[str, Any]], place: Path) -> dict[str, list[float]]:
    """Publish all steps and fetch each as a replica does; numbers by name, one for each step after the first."""
    location = open_location(place / "weights")
    numbers: dict[str, list[float]] = {"bytes": [], "changed": [], "publish": [], "fetch": []}
    before: dict[str, Any] = {}
    for version, state in enumerate(steps, start=1):
        began = time.perf_counter()
        with location.writing(), location.workspace(version) as target:
            manifest = transport.write(state, version=version, dtype=None, target=target)
            manifest = describe(manifest, target)
            location.commit(version, target)
        published = time.perf_counter() - began
        began = time.perf_counter()
        path = fetch(location.uri(version), str(version), place / "replica")
        fetched = time.perf_counter() - began
        if before:
            total = sum(value.numel() for value in state.values())
            differ = sum(int((state[name].view(torch.int16) != before[name].view(torch.int16)).sum()) for name in state)
            values = (sum(manifest.files.values()), differ / total, published, fetched)
            for name, value in zip(numbers, values, strict=True):
                numbers[name].append(value)
        before = state
        for old in location.versions()[:-1]:
            # An anchor is needed by nobody here.
            location.remove(old)
    served, wanted = read_directory(path), before
    for name, value in wanted.items():
        assert served[name].bits.tobytes() == value.contiguous().view(torch.int16).numpy().tobytes(), name
    print(f"  bit-identical after {len(numbers['bytes'])} steps: digest {digest_of(served)[:16]}", flush=True)
    return numbers


def report(name: str, numbers: dict[str, list[float]]) -> None:
    middle = {key: statistics.median(values) for key, values in numbers.items()}
    print(
        f"  {name:8s} {middle['bytes'] / 1e6:10.3f} MB  changed {100 * middle['changed']:5.2f} %  "
        f"publish {middle['publish']:6.3f} s (max {max(numbers['publish']):.3f})  "
        f"fetch {middle['fetch']:6.3f} s (max {max(numbers['fetch']):.3f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["tiny", "random"])
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--rate", type=float, help="learning rate; default: 1e-5 for tiny, 1e-6 for random")
    parser.add_argument("--place", type=Path, help="a directory on the disk to measure; default: the temporary one")
    arguments = parser.parse_args()
    rate = arguments.rate or (1e-5 if arguments.model == "tiny" else 1e-6)
    for name, transport, count in (("files", Files(), 4), ("deltas", Deltas(anchor_every=1000), STEPS)):
        steps = tiny_steps(rate) if arguments.model == "tiny" else random_steps(int(arguments.parameters), rate)
        place = Path(tempfile.mkdtemp(prefix="kuberoll-weights-", dir=arguments.place))
        try:
            report(name, measure(transport, itertools.islice(steps, count + 1), place))
        finally:
            shutil.rmtree(place)


if __name__ == "__main__":
    main()
