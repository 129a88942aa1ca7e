"""What a turn costs in things that can be counted: calls, allocations, bytes, objects. Times are in benchmarks/."""

from __future__ import annotations

import asyncio
import cProfile
import gc
import pstats
import tracemalloc
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parts import InstantEnvironment, InstantPolicy, rollout_of, samples
from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.record import FailureRecord, TrajectoryRecord, encode_line
from kuberoll_workers.output.turn_log import TurnLog
from kuberoll_workers.policy import wire
from kuberoll_workers.policy.interface import GenerationRequest, GenerationResult, SamplingParameters
from kuberoll_workers.rollouts.scheduling import run_rollout
from tests.output.support import Observed
from tests.trainer.support import trajectory

TRAJECTORIES, TURNS = 64, 8


async def play(journal: TurnLog | None) -> None:
    async def sink(result: TrajectoryRecord | FailureRecord) -> None:
        assert result.turn_count == TURNS

    async with rollout_of(
        InstantPolicy(64),
        InstantEnvironment(),
        scheduling="Concurrent",
        max_turns=TURNS,
        concurrency=TRAJECTORIES,
        turn_sink=None if journal is None else journal.append,
    ) as rollout:
        await run_rollout(rollout, samples(TRAJECTORIES, TURNS), sink)


def calls_per_turn(work: Callable[[], None]) -> float:
    """Calls of Python and C functions in this thread, for each turn."""
    profile = cProfile.Profile()
    profile.enable()
    work()
    profile.disable()
    stats: Any = pstats.Stats(profile)
    return float(stats.total_calls) / (TRAJECTORIES * TURNS)


@pytest.mark.parametrize(("journaled", "most"), [(False, 209), (True, 307)])
def test_calls_of_a_turn(tmp_path: Path, journaled: bool, most: int) -> None:
    """204 calls, and 270 to 297 with the turns journaled, which depends on how many are written together."""

    async def work() -> None:
        log = TurnLog(tmp_path, 0, seconds=Observed()) if journaled else None
        await play(log)
        if log is not None:
            await log.close()

    asyncio.run(work())
    assert calls_per_turn(lambda: asyncio.run(work())) <= most


class LastTurnTogether(InstantPolicy):
    """Answers the last turn of all trajectories when all have come to it; counts what is allocated then."""

    def __init__(self, trajectories: int, turns: int) -> None:
        super().__init__(64)
        self._trajectories, self._turns = trajectories, turns
        self._waiting, self._complete = 0, asyncio.Event()
        self.blocks = self.bytes = 0

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        if request.request_id.split("-")[3] == str(self._turns):
            self._waiting += 1
            if self._waiting == self._trajectories:
                gc.collect()
                found = tracemalloc.take_snapshot().statistics("filename")
                self.blocks, self.bytes = sum(each.count for each in found), sum(each.size for each in found)
                self._complete.set()
            await self._complete.wait()
        return await super().generate(request)


def allocations(trajectories: int, turns: int) -> tuple[int, int]:
    """Blocks of memory, and their bytes, while all trajectories are in their last turn."""
    policy = LastTurnTogether(trajectories, turns)

    async def sink(result: TrajectoryRecord | FailureRecord) -> None:
        assert result.turn_count == turns

    async def work() -> None:
        async with rollout_of(policy, InstantEnvironment(), max_turns=turns, concurrency=trajectories) as rollout:
            await run_rollout(rollout, samples(trajectories, turns), sink)

    tracemalloc.start()
    try:
        asyncio.run(work())
    finally:
        tracemalloc.stop()
    return policy.blocks, policy.bytes


def test_allocations_of_a_trajectory_in_flight() -> None:
    """80 blocks with 8 KB in the first turn, of which 100 tokens of prompt have 400 bytes; 19 with 2 KB in each other.

    The difference of two runs leaves out what there is once.
    """

    def held(turns: int) -> tuple[float, float]:
        few, many = allocations(64, turns), allocations(192, turns)
        return (many[0] - few[0]) / 128, (many[1] - few[1]) / 128

    allocations(8, 1)
    first, ninth = held(1), held(9)
    assert first[0] <= 90
    assert first[1] <= 9000
    assert (ninth[0] - first[0]) / 8 <= 22
    assert (ninth[1] - first[1]) / 8 <= 2200


def request(tokens: int) -> GenerationRequest:
    return GenerationRequest(
        request_id="1-0-0-1-0",
        session_id="1-0-0",
        token_ids=token_array(range(tokens)),
        sampling=SamplingParameters(max_tokens=256, seed=1),
    )


def result(tokens: int) -> GenerationResult:
    return GenerationResult(
        token_ids=token_array(range(tokens)),
        logprobs=array("f", [-0.5] * tokens),
        finish_reason="stop",
        policy_versions=(("3", 0, tokens),),
    )


def test_bytes_of_a_turn_on_the_wire() -> None:
    """Four bytes for each id, four for each log-probability, and less than 200 around them."""
    for tokens in (0, 1000, 100_000):
        assert len(wire.encode_request(request(tokens))) <= 4 * tokens + 200
        assert len(wire.encode_result(result(tokens), wire.MSGPACK)) <= 8 * tokens + 200


def objects(held: object) -> int:
    """Objects that one holds, itself among them; not the types, which it shares with all others of its kind."""
    found = {id(held): held}
    waiting = [held]
    while waiting:
        for referent in gc.get_referents(waiting.pop()):
            if not isinstance(referent, type) and id(referent) not in found:
                found[id(referent)] = referent
                waiting.append(referent)
    return len(found)


def test_no_object_for_each_token() -> None:
    """Ids and log-probabilities stay arrays from the wire to the record: what is held does not grow with them."""

    def asked(tokens: int) -> GenerationRequest:
        return wire.decode_request(wire.encode_request(request(tokens)))

    def received(tokens: int) -> GenerationResult:
        return wire.decode_result(wire.encode_result(result(tokens), wire.MSGPACK), wire.MSGPACK)

    def recorded(tokens: int) -> TrajectoryRecord:
        kept = received(tokens)
        said = Message("assistant", "x", kept.token_ids, kept.logprobs, 1, list(kept.policy_versions), sampled=True)
        return trajectory(0, 0, reward=1.0, messages=[said])

    assert objects(list(range(10_000))) > 10_000
    for hold in (asked, received, recorded):
        assert objects(hold(10_000)) == objects(hold(10)), hold


def test_bytes_of_a_token_in_the_journal() -> None:
    """An id, and a log-probability in its shortest form."""

    def size(tokens: int) -> int:
        said = Message(
            "assistant",
            "x",
            token_array([999] * tokens),
            array("f", [-0.123456] * tokens),
            1,
            [("3", 0, tokens)],
            sampled=True,
        )
        return len(encode_line(trajectory(0, 0, reward=1.0, messages=[said])))

    assert (size(10_000) - size(1_000)) / 9_000 <= 16
