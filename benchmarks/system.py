"""How much of an engine's own throughput reaches the user's trajectories: `kuberoll run` against vLLM alone.

A random model of some 4 million parameters, so that on a CPU a step of the engine takes about as long as on a GPU: 10
to 30 ms. For a GPU choose a real model's size: `--width 2048 --layers 24` are 1.3 billion parameters.

Each way is measured from the first request to the last token, without the start. vLLM alone gets the very prompts,
seeds and numbers of tokens of the run, in a process of its own that does nothing else:

- single turn, all at once: `LLM.generate`;
- several turns, with environments that take 0 or 200 ms: vLLM's engine stepped in a loop that sends each next turn at
  once, or 200 ms later, which no schedule can better.

The CPU time of the run's processes between its first request and its last token says what is lost where: on a machine
with two cores all that is not the engine slows it down.

    .venv/bin/python -m benchmarks.system [--trajectories 64] [--tokens 256] [--turns 4]
    python -m benchmarks.system --width 2048 --layers 24 --dtype bfloat16 --trajectories 256    # on a GPU
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.figures import Figure
from benchmarks.process_times import OTHERS, PARTS, ProcessTimes
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.output.run_files import RunFiles
from kuberoll_workers.serving.engines.vllm_engine import CPU_ENVIRONMENT, engine_arguments, is_cpu_build

HERE = Path(__file__).parents[1]
TOKENIZER = HERE / "examples" / "models" / "tiny-policy"
WINDOW = 2048


class Size(NamedTuple):
    """Of the random model; `dtype` is that of its files and of the engine."""

    width: int = 256
    layers: int = 4
    dtype: str = "float32"

    @property
    def engine(self) -> dict[str, Any]:
        """Arguments of the engine."""
        return {"dtype": self.dtype, "max_model_len": WINDOW, "max_num_seqs": 256}


SMALL = Size()


class Case(NamedTuple):
    """What is generated.

    Attributes:
        seconds: Of each step of the environment.
    """

    name: str
    turns: int
    seconds: float


class Turn(NamedTuple):
    """A turn of a run: what was asked, as far as it was not said before, and how long the response was."""

    new: list[int]
    tokens: int


class Alone(NamedTuple):
    """Tokens per second of vLLM alone, and the share of the time in which it had nothing to do."""

    rate: float
    idle: float


def make_model(directory: Path, size: Size = SMALL) -> None:
    """Write a random model with the tokenizer of the tiny policy; its heads have 64 dimensions."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    config, tokenizer = AutoConfig.from_pretrained(TOKENIZER), AutoTokenizer.from_pretrained(TOKENIZER)
    for name, value in {
        # Without padding, which a random model would sample: a trajectory with an id that is no token fails.
        "vocab_size": len(tokenizer),
        "hidden_size": size.width,
        "intermediate_size": 3 * size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.width // 64,
        "num_key_value_heads": size.width // 64,
        "head_dim": 64,
        "max_position_embeddings": WINDOW,
    }.items():
        setattr(config, name, value)
    if hasattr(config, "layer_types"):
        config.layer_types = None
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, size.dtype)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def manifest(model: Path, case: Case, size: Size, *, trajectories: int, tokens: int) -> dict[str, Any]:
    """A job of this case."""
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    rows = [{"prompt": f"{number} " + " ".join(words[number % 7 :]) * 3} for number in range(trajectories)]
    return {
        "apiVersion": "kuberoll.io/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "system"},
        "spec": {
            "generation": {
                "model": {"source": str(model)},
                "engineArgs": size.engine,
                # A seventh of the vocabulary ends a response after the minimum: one that reached the maximum would end
                # its trajectory.
                "sampling": {
                    "maxTokens": tokens + 64,
                    "minTokens": tokens,
                    "stopTokenIds": list(range(100, 164)),
                    "seed": 1,
                },
            },
            "environments": [
                {
                    "name": "turns",
                    "entrypoint": "benchmarks.system_environment:Turns",
                    "config": {"turns": case.turns, "seconds": case.seconds},
                }
            ],
            "dataset": {"source": {"rows": rows}},
            "rollout": {"concurrency": trajectories},
        },
    }


def run(document: dict[str, Any], output: Path) -> tuple[list[TrajectoryRecord], ProcessTimes]:
    """`kuberoll run`: its trajectories, and the CPU times of its processes."""
    job = output.with_suffix(".yaml")
    job.write_text(json.dumps(document))
    kuberoll = Path(sys.executable).with_name("kuberoll")
    command = [str(kuberoll), "run", str(job), "--output", str(output), "--metrics-port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(HERE), "XDG_STATE_HOME": str(output.parent)}
    with ProcessTimes() as times:
        done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return [record for record in RunFiles(str(output)).trajectories() if isinstance(record, TrajectoryRecord)], times


def intervals(records: Sequence[TrajectoryRecord]) -> list[tuple[float, float]]:
    """When each request was sent and answered, as the worker saw it."""
    found = []
    for record in records:
        timing = record.timing
        for ended, waited, stepped in zip(
            timing.ended_at, timing.generation_seconds, timing.environment_seconds, strict=True
        ):
            assert ended is not None
            answered = ended - stepped
            found.append((answered - waited, answered))
    return sorted(found)


def idle_share(found: Sequence[tuple[float, float]]) -> float:
    """Share of the time from the first request to the last answer in which no request was open."""
    busy, until = 0.0, found[0][0]
    for began, ended in found:
        busy += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return 1 - busy / (until - found[0][0])


def turns_of(record: TrajectoryRecord) -> list[Turn]:
    """The turns of a trajectory, as vLLM alone is to repeat them."""
    turns: list[Turn] = []
    new: list[int] = []
    for message in record.messages:
        if message.sampled:
            turns.append(Turn(new, len(message.token_ids)))
            new = []
        else:
            new += list(message.token_ids)
    return turns


def alone(model: Path, given: Sequence[Sequence[Turn]], seconds: float, engine_args: Mapping[str, Any]) -> Alone:
    """vLLM in this process, as fast as it can."""
    if is_cpu_build():
        os.environ.update({name: value for name, value in CPU_ENVIRONMENT.items() if name not in os.environ})
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    arguments = engine_arguments(engine_args, model=str(model), tokenizer=str(model), revision=None, cpu=is_cpu_build())
    llm = LLM(**arguments)

    def parameters(trajectory: int, tokens: int) -> Any:
        return SamplingParams(
            max_tokens=tokens, min_tokens=tokens, seed=trajectory, logprobs=0, flat_logprobs=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip

    llm.generate([{"prompt_token_ids": [1, 2, 3]}], parameters(0, 2), use_tqdm=False)
    total = sum(turn.tokens for turns in given for turn in turns)
    if all(len(turns) == 1 for turns in given):
        prompts = [{"prompt_token_ids": turns[0].new} for turns in given]
        asked = [parameters(number, turns[0].tokens) for number, turns in enumerate(given)]
        began = time.perf_counter()
        llm.generate(prompts, asked, use_tqdm=False)
        return Alone(total / (time.perf_counter() - began), 0.0)
    engine = llm.llm_engine
    contexts: list[list[int]] = [[] for _ in given]
    later: list[tuple[float, int, int]] = [(0.0, number, 0) for number in range(len(given))]
    idle = 0.0
    began = time.perf_counter()
    while later or engine.has_unfinished_requests():
        now = time.perf_counter() - began
        while later and later[0][0] <= now:
            _, number, turn = heapq.heappop(later)
            contexts[number] += given[number][turn].new
            prompt: Any = {"prompt_token_ids": list(contexts[number])}
            engine.add_request(f"{number}-{turn}", prompt, parameters(number, given[number][turn].tokens))
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, later[0][0] - (time.perf_counter() - began)))
            idle += time.perf_counter() - began - now
            continue
        for output in engine.step():
            if output.finished:
                number, turn = map(int, output.request_id.split("-")[:2])
                contexts[number] += output.outputs[0].token_ids
                if turn + 1 < len(given[number]):
                    heapq.heappush(later, (time.perf_counter() - began + seconds, number, turn + 1))
    whole = time.perf_counter() - began
    return Alone(total / whole, idle / whole)


def measure_alone(model: Path, given: Sequence[Sequence[Turn]], seconds: float, size: Size, directory: Path) -> Alone:
    """`alone` in a process of its own."""
    asked = directory / "alone.json"
    asked.write_text(json.dumps({"model": str(model), "seconds": seconds, "given": given, "engine": size.engine}))
    command = [sys.executable, "-m", "benchmarks.system", "--alone", str(asked)]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return Alone(*json.loads(answer_file(asked).read_text()))


def answer_file(asked: Path) -> Path:
    """Where the process that was asked leaves its numbers; vLLM prints to its output also as it ends."""
    return asked.with_suffix(".answer.json")


def cases(turns: int) -> tuple[Case, ...]:
    """The cases, by the names of their figures."""
    return (
        Case("system_over_engine_single_turn", 1, 0.0),
        Case("system_over_engine_multi_turn", turns, 0.0),
        Case("system_over_engine_slow_environment", turns, 0.2),
    )


def figures(
    *,
    trajectories: int = 64,
    tokens: int = 256,
    turns: int = 4,
    rounds: int = 2,
    size: Size = SMALL,
    only: Container[str] | None = None,
) -> Iterator[Figure]:
    """Measure all cases, or those that are named; the ways take turns, and the best of each counts."""
    goals = {"system_over_engine_single_turn": 0.97, "system_over_engine_multi_turn": 0.95}
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        model = directory / "model"
        make_model(model, size)
        for case in cases(turns):
            if only is not None and case.name not in only:
                continue
            document = manifest(model, case, size, trajectories=trajectories, tokens=tokens)
            rates, idle, bounds, spent = [], [], [], []
            for number in range(rounds):
                records, times = run(document, directory / f"{case.name}-{number}")
                if any(record.turn_count != case.turns for record in records):
                    raise SystemExit(f"{case.name}: not all trajectories have {case.turns} turns")
                found = intervals(records)
                generated = sum(record.tokens.generated for record in records)
                begin, end = found[0][0], max(end for _, end in found)
                rates.append(generated / (end - begin))
                spent.append({part: 1e6 * value / generated for part, value in times.between(begin, end).items()})
                idle.append(idle_share(found))
                bounds.append(measure_alone(model, list(map(turns_of, records)), case.seconds, size, directory))
            bound = max(one.rate for one in bounds)
            print(
                f"{case.name}: {', '.join(f'{rate:.0f}' for rate in rates)} tokens/s; vLLM alone "
                f"{', '.join(f'{one.rate:.0f}' for one in bounds)}; without a request "
                f"{100 * min(idle):.1f} % of the time, alone {100 * min(one.idle for one in bounds):.1f} %",
                flush=True,
            )
            parts = {part: min(one.get(part, 0.0) for one in spent) for part in (*PARTS, OTHERS)}
            print(f"  CPU, µs a token: {', '.join(f'{part} {value:.1f}' for part, value in parts.items())}", flush=True)
            yield Figure(case.name, max(rates) / bound, "ratio", bound=1.0, goal=goals.get(case.name), better="higher")
            if case.turns == 1:
                yield Figure("replica_cpu_us_per_token", parts["replica"], "µs")
                yield Figure("ray_cpu_us_per_token", parts[OTHERS], "µs")
            if case.seconds:
                yield Figure(
                    "engine_idle_slow_environment", min(idle), "share", bound=min(one.idle for one in bounds),
                    goal=0.03,
                )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--width", type=int, default=SMALL.width, help="of the model, a multiple of 64")
    parser.add_argument("--layers", type=int, default=SMALL.layers)
    parser.add_argument("--dtype", default=SMALL.dtype, help="of the model and the engine")
    parser.add_argument("--case", action="append", choices=[case.name for case in cases(1)], help="only this one")
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone is not None:
        asked = json.loads(given.alone.read_text())
        turns = [[Turn(*turn) for turn in one] for one in asked["given"]]
        found = alone(Path(asked["model"]), turns, asked["seconds"], asked["engine"])
        answer_file(given.alone).write_text(json.dumps(found))
        return
    measured = figures(
        trajectories=given.trajectories,
        tokens=given.tokens,
        turns=given.turns,
        rounds=given.rounds,
        size=Size(given.width, given.layers, given.dtype),
        only=given.case,
    )
    for figure in measured:
        print(figure, flush=True)


if __name__ == "__main__":
    main()
