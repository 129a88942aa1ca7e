"""The loop with the real engine, vLLM on this machine's CPU, and the tiny policy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import pytest
import pytest_asyncio

from kuberoll_workers.data.chat_observations import ChatTemplateObservations
from kuberoll_workers.data.messages import ExtendedMessage, Message
from kuberoll_workers.data.prompts import Prompt, Sample, SampleGroup
from kuberoll_workers.data.record import DroppedRecord, TrajectoryRecord
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer, load_tokenizer
from kuberoll_workers.environments import ToolEnvironment, tool
from kuberoll_workers.environments.builtin.sliding_puzzle import SlidingPuzzleEnvironment
from kuberoll_workers.environments.interface import EnvironmentReturn
from kuberoll_workers.policy.interface import GenerationRequest, GenerationResult, SamplingParameters, StructuredOutputs
from kuberoll_workers.rollouts.rollout import Rollout
from kuberoll_workers.rollouts.scheduling import run_groups, run_rollout
from kuberoll_workers.rollouts.settings import RolloutSettings
from kuberoll_workers.rollouts.streaming import stream_trajectories
from kuberoll_workers.serving.engines.vllm_engine import VLLMEngine
from kuberoll_workers.telemetry import RolloutMetrics
from tests.rollouts.fakes import runners, until

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

TINY = str(Path(__file__).parents[2] / "examples" / "models" / "tiny-policy")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[VLLMEngine]:
    made = VLLMEngine(
        model=TINY,
        tokenizer=TINY,
        revision=None,
        engine_args={"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 1 << 27},
        tool_call_parser="hermes",
    )
    await made.start()
    try:
        yield made
    finally:
        await made.shutdown()


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.load(TINY)


class Stopping:
    """Asks for so many turns, and for its own stop strings in each."""

    def __init__(self, stops: list[str] | None) -> None:
        self._stops = stops

    def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        left = [state["turns"] - 1 for state in metadata]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": " go on "} for _ in logs],
            metadata=[{"turns": turns} for turns in left],
            next_stop_strings=[self._stops for _ in logs],
            rewards=[0.0 for _ in logs],
            terminateds=[turns <= 0 for turns in left],
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}


class Garden(ToolEnvironment):
    """With little text: the window has 512 tokens."""

    @tool
    def dig(self, at: str) -> int:
        return len(at)

    @tool
    def sow(self, at: Literal["pot"]) -> str:
        return at


def rollout_of(engine: VLLMEngine, tokenizer: HuggingFaceTokenizer, environments: Any, **changes: Any) -> Rollout:
    observations, policy = changes.pop("observations", None), changes.pop("policy", engine)
    values: dict[str, Any] = {
        "max_turns": 6,
        "max_sequence_length": 512,
        "concurrency": 16,
        "sampling": SamplingParameters(max_tokens=16, temperature=1.0),
        **changes,
    }
    return Rollout(
        policy=policy,
        environments=environments,
        tokenizer=tokenizer,
        settings=RolloutSettings(**values),
        metrics=RolloutMetrics("test"),
        observations=observations,
    )


def prompt_of(tokenizer: HuggingFaceTokenizer, index: int, row: dict[str, Any], task_name: str) -> Prompt:
    ids = tokenizer.render_chat(row["messages"])
    return Prompt(
        task_index=index,
        task_name=task_name,
        idx=index,
        messages=(Message("user", row["messages"][-1]["content"], ids),),
        token_ids=ids,
        metadata=row["metadata"],
        stop_strings=tuple(row["stop_strings"]) if row.get("stop_strings") else None,
        sampling={},
    )


def puzzles(tokenizer: HuggingFaceTokenizer, count: int) -> list[Sample]:
    rows = SlidingPuzzleEnvironment({"size": 2, "maxMoves": 6}).generate_dataset(count, 3)
    prompts = [prompt_of(tokenizer, index, row, "puzzle") for index, row in enumerate(rows)]
    return [
        Sample(prompt=prompt, rollout_index=number, seed=100 * index + number)
        for index, prompt in enumerate(prompts)
        for number in range(2)
    ]


async def played(rollout: Rollout, samples: list[Sample]) -> list[TrajectoryRecord]:
    results: dict[Any, Any] = {}

    async def sink(result: Any) -> None:
        results[result.key] = result

    await run_rollout(rollout, samples, sink)
    return [results[sample.key] for sample in samples]


def tokens(records: list[TrajectoryRecord]) -> list[list[list[int]]]:
    return [[list(message.token_ids) for message in record.messages] for record in records]


async def test_seeds_reproduce_in_both_schedulings_and_any_company(
    engine: VLLMEngine, tokenizer: HuggingFaceTokenizer
) -> None:
    environment = SlidingPuzzleEnvironment({"size": 2, "maxMoves": 6})
    samples = puzzles(tokenizer, 6)
    async with runners({"puzzle": environment}) as made:
        reference = await played(rollout_of(engine, tokenizer, made), samples)
        for changes in ({"scheduling": "Lockstep"}, {"concurrency": 1}, {"scheduling": "Lockstep", "concurrency": 5}):
            again = await played(rollout_of(engine, tokenizer, made, **changes), samples)
            assert tokens(again) == tokens(reference)
            assert [r.stop_reason for r in again] == [r.stop_reason for r in reference]
    assert {record.turn_count for record in reference} > {1}
    assert all(m.logprobs is not None for r in reference for m in r.messages if m.role == "assistant")


@pytest.mark.parametrize("scheduling", ["Concurrent", "Lockstep"])
async def test_stop_strings_do_not_leak_between_trajectories(
    engine: VLLMEngine, tokenizer: HuggingFaceTokenizer, scheduling: str
) -> None:
    """With and without neighbours that stop at almost anything, a trajectory without stop strings is the same."""
    row = {"messages": [{"role": "user", "content": "The board is:\n1 _\n3 2\n"}], "metadata": {"turns": 3}}
    environments = {"greedy_stop": Stopping(["e", "a", "t", "o"]), "free": Stopping(None)}
    free = [Sample(prompt=prompt_of(tokenizer, n, row, "free"), rollout_index=0, seed=n) for n in range(6)]
    stopping = [
        Sample(
            prompt=prompt_of(tokenizer, 100 + n, {**row, "stop_strings": ["e", "a", "t", "o"]}, "greedy_stop"),
            rollout_index=0,
            seed=n,
        )
        for n in range(6)
    ]
    hot = SamplingParameters(max_tokens=24, temperature=2.0)
    async with runners(environments) as made:
        rollout = rollout_of(engine, tokenizer, made, sampling=hot, scheduling=scheduling)
        alone = await played(rollout, free)
        mixed = await played(rollout, [sample for pair in zip(free, stopping, strict=True) for sample in pair])
    assert tokens(mixed[0::2]) == tokens(alone)
    stopped = [m for record in mixed[1::2] for m in record.messages if m.role == "assistant" and not m.truncated]
    assert stopped
    for message in stopped:
        # The stop string is part of the response, and ends it.
        assert not any(stop in tokenizer.decode(message.token_ids[:-1]) for stop in "eato")


async def test_what_is_not_wanted_leaves_the_engine(engine: VLLMEngine, tokenizer: HuggingFaceTokenizer) -> None:
    row = {"messages": [{"role": "user", "content": "The board is:\n1 _\n3 2\n"}], "metadata": {"turns": 1}}
    prompt = prompt_of(tokenizer, 0, row, "free")
    quick = [Sample(prompt=prompt, rollout_index=n, seed=n) for n in range(2)]
    # No other sample comes to an end by itself before the window is full.
    endless = prompt_of(tokenizer, 1, {**row, "metadata": {"turns": 10**6}}, "free")
    slow = [Sample(prompt=endless, rollout_index=n, seed=n) for n in range(2, 6)]
    results: list[Any] = []

    async def sink(result: Any) -> None:
        results.append(result)

    async with runners({"free": Stopping(None)}) as made:
        rollout = rollout_of(engine, tokenizer, made, max_turns=10**6)
        await run_groups(rollout, [SampleGroup(samples=(*quick, *slow), keep=2)], sink)
        assert sum(isinstance(result, TrajectoryRecord) for result in results) == 2
        assert sum(isinstance(result, DroppedRecord) for result in results) == 4
        async with asyncio.timeout(240):
            await until(lambda: engine.info().ongoing_requests == 0)
        # And who leaves a stream takes his requests along.
        async with stream_trajectories(rollout, slow):
            async with asyncio.timeout(240):
                await until(lambda: engine.info().ongoing_requests == len(slow))
        async with asyncio.timeout(240):
            await until(lambda: engine.info().ongoing_requests == 0)
    await engine.check_health()


async def test_chat_template_observations(engine: VLLMEngine, tokenizer: HuggingFaceTokenizer) -> None:
    row = {"messages": [{"role": "user", "content": "The board is:\n1 _\n3 2\n"}], "metadata": {"turns": 3}}
    samples = [Sample(prompt=prompt_of(tokenizer, n, row, "free"), rollout_index=0, seed=n) for n in range(4)]
    async with runners({"free": Stopping(None)}) as made:
        rollout = rollout_of(engine, tokenizer, made, observations=ChatTemplateObservations(tokenizer))
        records = await played(rollout, samples)
    raw = tokenizer.encode(" go on ")
    for record in records:
        assert record.stop_reason in ("terminated", "truncated")
        for message in record.messages:
            if message.role == "environment":
                assert len(message.token_ids) > len(raw)


# The tiny policy calls nothing by itself: its responses are made to be calls.
CALL = r'<tool_call>\{"name": "(dig|sow|eat)", "arguments": \{"at": "(pot|bed)"\}\}</tool_call>'


class Watching:
    """A policy whose requests are kept."""

    def __init__(self, engine: VLLMEngine) -> None:
        self.engine = engine
        self.requests: list[tuple[str, list[int], Any]] = []

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.requests.append((request.session_id, list(request.token_ids), request.tools))
        return await self.engine.generate(request)


@pytest.mark.parametrize("calls", [CALL, r"<tool_call>(\{|dig|x)</tool_call>"], ids=["calls", "malformed"])
async def test_calls_are_parsed_by_vllm_and_prompts_continue_what_was_sampled(engine: VLLMEngine, calls: str) -> None:
    hugging_face = load_tokenizer(TINY)
    hugging_face.chat_template = (
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + hugging_face.chat_template
    )
    tokenizer = HuggingFaceTokenizer(hugging_face)
    chat = [{"role": "user", "content": "Dig."}]
    ids = tokenizer.render_chat(chat)
    prompt = Prompt(
        task_index=0,
        task_name="garden",
        idx=None,
        messages=(Message("user", chat[0]["content"], ids),),
        token_ids=ids,
        metadata={},
        stop_strings=None,
        sampling={},
    )
    form = StructuredOutputs(regex=calls)
    watched = Watching(engine)
    async with runners({"garden": Garden({})}) as made:
        rollout = rollout_of(
            engine,
            tokenizer,
            made,
            max_turns=2,
            sampling=SamplingParameters(max_tokens=100, structured_outputs=form),
            observations=ChatTemplateObservations(tokenizer),
            engine_parses_calls=True,
            policy=watched,
        )
        records = await played(rollout, [Sample(prompt=prompt, rollout_index=n, seed=n) for n in range(4)])
    names = set()
    for record in records:
        assert (record.stop_reason, record.turn_count) == ("max_turns", 2)
        asked = [(ids, tools) for session, ids, tools in watched.requests if session == f"0-{record.rollout_index}-0"]
        assert [tools for _, tools in asked] == [record.tools] * 2
        response, answer = record.messages[1:3]
        (before, _), (after, _) = asked
        # Exactly the ids that were sent and sampled, and then the answer's.
        assert after == [*before, *response.token_ids, *answer.token_ids]
        assert tokenizer.decode(answer.token_ids).endswith(answer.content)
        assert isinstance(response, ExtendedMessage)
        (call,) = response.fields["tool_calls" if calls == CALL else "invalid_tool_calls"]
        assert isinstance(answer, ExtendedMessage)
        assert (answer.role, answer.fields["tool_call_id"]) == ("tool", call["id"])
        if calls == CALL:
            names.add(call["function"]["name"])
            assert json.loads(call["function"]["arguments"])["at"] in ("pot", "bed")
        else:
            assert answer.content.startswith("Error: this call cannot be read: ")
    assert bool(names) == (calls == CALL)
