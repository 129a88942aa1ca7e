"""The same policy, seeds and environments give the same trajectories, however they are scheduled or interrupted."""

from __future__ import annotations

import asyncio
import random
from array import array
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.data.prompts import Sample
from kuberoll_workers.data.record import Partial, TurnRecord, decode_line, encode_line
from kuberoll_workers.environments.interface import EnvironmentReturn
from kuberoll_workers.policy.interface import GenerationRequest, GenerationResult
from kuberoll_workers.rollouts.scheduling import run_rollout
from kuberoll_workers.rollouts.streaming import stream_trajectories
from tests.rollouts.fakes import roll, rollout_of, runners, sample


class SeededPolicy:
    """What it answers depends on the prompt and the sampling parameters alone, as with a real engine."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        draw = random.Random(repr((request.token_ids.tolist(), request.sampling)))
        # So that trajectories overtake each other.
        for _ in range(draw.randrange(4)):
            await asyncio.sleep(0)
        length = draw.randrange(12)
        ids = token_array(draw.randrange(97, 123) for _ in range(min(length, request.sampling.max_tokens)))
        return GenerationResult(
            token_ids=ids,
            logprobs=array("f", [-draw.random() for _ in ids]),
            finish_reason="length" if len(ids) < length or len(ids) == request.sampling.max_tokens else "stop",
            policy_versions=(("v", 0, len(ids)),) if ids else (),
        )


class SeededEnvironment:
    """Observation, reward, state and end depend on the log and the state alone."""

    def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        draws = [random.Random(repr((log, state))) for log, state in zip(logs, metadata, strict=True)]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "o" * draw.randrange(9)} for draw in draws],
            metadata=[
                None if draw.random() < 0.2 else {"steps": state["steps"] + 1}
                for draw, state in zip(draws, metadata, strict=True)
            ],
            next_stop_strings=[draw.choice([None, ["q"], ["x", "y"]]) for draw in draws],
            rewards={
                "right": [draw.choice([0.0, 0.1, 1.0]) for draw in draws],
                "short": [-0.25 * draw.random() for draw in draws],
            },
            terminateds=[draw.random() < 0.3 for draw in draws],
            answers=[draw.choice([None, "7"]) for draw in draws],
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}


def content(record: Any) -> Any:
    """A record without what a clock measured."""
    plain = msgspec.json.decode(encode_line(record))
    del plain["timing"]
    # Whether it was interrupted.
    plain.pop("incidents", None)
    return plain


def samples(prompts: list[int]) -> list[Sample]:
    return [
        sample(index, number, prompt="p" * length, metadata={"steps": 0}, seed=1000 * index + number)
        for index, length in enumerate(prompts)
        for number in range(2)
    ]


RUNS: dict[str, Any] = {"policy": SeededPolicy(), "environments": {"env": SeededEnvironment()}, "max_turns": 6}


@given(
    prompts=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    concurrency=st.integers(1, 7),
    other=st.integers(1, 20),
    window=st.integers(20, 120),
)
def test_lockstep_and_concurrent_and_any_concurrency_agree(
    prompts: list[int], concurrency: int, other: int, window: int
) -> None:
    changes = {**RUNS, "max_sequence_length": window}
    given_samples = samples(prompts)
    reference = asyncio.run(roll(given_samples, concurrency=concurrency, **changes))
    for scheduling, size in (("Lockstep", concurrency), ("Concurrent", other), ("Lockstep", other)):
        again = asyncio.run(roll(given_samples, scheduling=scheduling, concurrency=size, **changes))
        assert [content(record) for record in again] == [content(record) for record in reference]


@given(prompts=st.lists(st.integers(1, 60), min_size=1, max_size=5), window=st.integers(20, 120))
def test_tokens_add_up_and_every_prompt_continues_the_one_before(prompts: list[int], window: int) -> None:
    sent: dict[str, list[list[int]]] = {}

    class Watched(SeededPolicy):
        async def generate(self, request: GenerationRequest) -> GenerationResult:
            sent.setdefault(request.session_id, []).append(request.token_ids.tolist())
            return await super().generate(request)

    records = asyncio.run(roll(samples(prompts), **{**RUNS, "policy": Watched(), "max_sequence_length": window}))
    for record in records:
        by_role = {"user": 0, "assistant": 0, "environment": 0}
        for message in record.messages:
            by_role[message.role] += len(message.token_ids)
        assert by_role == {
            "user": record.tokens.prompt,
            "assistant": record.tokens.generated,
            "environment": record.tokens.environment,
        }
        assert sum(by_role.values()) <= max(window, record.tokens.prompt)
        ids = [token for message in record.messages for token in message.token_ids]
        for prompt in sent.get(f"{record.task_index}-{record.rollout_index}-0", []):
            assert ids[: len(prompt)] == prompt
        assert len(record.rewards) == len(record.timing.generation_seconds) == record.turn_count
        assert all(len(values) == record.turn_count for values in record.reward_parts.values())


@given(
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    read=st.integers(0, 6),
    steps=st.integers(0, 60),
    scheduling=st.sampled_from(["Concurrent", "Lockstep"]),
)
def test_interrupted_and_resumed_is_uninterrupted(prompts: list[int], read: int, steps: int, scheduling: str) -> None:
    changes = {**RUNS, "max_sequence_length": 150, "scheduling": scheduling}
    environments = changes.pop("environments")
    todo = samples(prompts)

    async def interrupted() -> list[Any]:
        async with runners(environments) as made:
            rollout = rollout_of(made, **changes)
            async with stream_trajectories(rollout, todo) as stream:
                ended = []
                async for record in stream:
                    ended.append(record)
                    if len(ended) > read:
                        break
                for _ in range(steps):
                    await asyncio.sleep(0)
            ended += stream.unread
            done = {record.key for record in ended}
            # Through JSON and back, as from a file.
            partials = {
                partial.key: Partial([decode_line(encode_line(t), TurnRecord, where="") for t in partial.turns])
                for partial in stream.partials
            }
            assert not done & set(partials)
            rest = [
                Sample(prompt=s.prompt, rollout_index=s.rollout_index, seed=s.seed, partial=partials.get(s.key))
                for s in todo
                if s.key not in done
            ]

            async def sink(record: Any) -> None:
                ended.append(record)

            await run_rollout(rollout, rest, sink)
            return ended

    reference = {
        record.key: content(record) for record in asyncio.run(roll(todo, environments=environments, **changes))
    }
    again = asyncio.run(interrupted())
    assert {record.key: content(record) for record in again} == reference
    assert len(again) == len(reference)


async def test_turn_records_are_enough_to_go_on() -> None:
    """Every journaled turn, through its JSON line, is a place to go on from."""
    turns: dict[Any, list[TurnRecord]] = {}

    async def turn_sink(turn: TurnRecord) -> None:
        line = encode_line(turn)
        turns.setdefault(turn.key, []).append(decode_line(line, TurnRecord, where="here"))

    changes = {**RUNS, "max_sequence_length": 150}
    environments = changes.pop("environments")
    todo = samples([5, 9, 13, 17])
    reference = {record.key: content(record) for record in await roll(todo, environments=environments, **changes)}
    ended: list[Any] = []

    async def sink(record: Any) -> None:
        ended.append(record)

    async with runners(environments) as made:
        await run_rollout(rollout_of(made, turn_sink=turn_sink, **changes), todo, sink)
        assert turns
        for item in todo:
            for count in range(1, len(turns.get(item.key, [])) + 1):
                partial = Partial(turns[item.key][:count])
                again = Sample(prompt=item.prompt, rollout_index=item.rollout_index, seed=item.seed, partial=partial)
                await run_rollout(rollout_of(made, **changes), [again], sink)
                assert content(ended[-1]) == reference[item.key]
