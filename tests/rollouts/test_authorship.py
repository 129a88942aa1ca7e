"""What the policy's engine sampled, and nothing else, is marked for learning: in the loop."""

from __future__ import annotations

import asyncio
import tempfile
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.prompts import Prompt, Sample
from kuberoll_workers.data.record import Partial, TrajectoryRecord, TurnRecord, decode_line, encode_line
from kuberoll_workers.environments.interface import EnvironmentReturn, EpisodeStart
from kuberoll_workers.output.parquet import read_parquet, write_parquet
from kuberoll_workers.policy.interface import GenerationRequest, GenerationResult, SamplingParameters
from kuberoll_workers.rollouts.scheduling import run_rollout
from tests.examples import examples
from tests.rollouts.fakes import CharacterTokenizer, rollout_of, runners
from tests.rollouts.marks import EngineLog, check_marks

ROLES = ("environment", "user", "assistant", "tool", "system", "white")
ECHO = "ECHO"


class Engine:
    """Samples characters that it has never sampled before, and keeps its own account of it."""

    def __init__(self, lengths: list[int]) -> None:
        self.log = EngineLog()
        self._lengths = lengths
        self._next = 0x4E00

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        await asyncio.sleep(0)
        length = min(self._lengths[len(self.log.calls) % len(self._lengths)], request.sampling.max_tokens)
        ids = token_array(range(self._next, self._next + length))
        logprobs = array("f", [-0.001 * (token - 0x4DFF) for token in ids])
        self._next += length
        self.log.add(request.token_ids, ids, logprobs)
        cut = length == request.sampling.max_tokens
        return GenerationResult(
            token_ids=ids,
            logprobs=logprobs,
            finish_reason="length" if cut else "stop",
            policy_versions=(("3", 0, length),) if length else (),
        )


class Talker:
    """Answers with the messages of a script, which may repeat what the policy said, and in its role."""

    recovery = "metadata"

    def __init__(self, reset: list[dict[str, str]], turns: list[list[dict[str, str]]]) -> None:
        self._reset, self._turns = reset, turns

    def reset(self, episodes: list[Any]) -> list[EpisodeStart]:
        return [EpisodeStart(messages=self._reset, metadata={"turn": 0}) for _ in episodes]

    def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        turns = [state["turn"] for state in metadata]
        observations = [
            [
                {**message, "content": message["content"].replace(ECHO, log[-1]["content"])}
                for message in self._turns[turn]
            ]
            for turn, log in zip(turns, logs, strict=True)
        ]
        over = [turn + 1 == len(self._turns) for turn in turns]
        return EnvironmentReturn(observations, [{"turn": turn + 1} for turn in turns], None, [1.0] * len(turns), over)


def _says(*contents: str) -> st.SearchStrategy[dict[str, str]]:
    return st.fixed_dictionaries({"role": st.sampled_from(ROLES), "content": st.sampled_from(contents)})


prompts = st.lists(_says("p", "few-shot", ""), max_size=4)
scripts = st.lists(st.lists(_says("", "e4", f"so: {ECHO}", ECHO, "o" * 30), max_size=3), min_size=1, max_size=4)


async def _play(
    environment: Talker, prompt: list[dict[str, str]], engine: Engine, window: int, turns: list[TurnRecord] | None
) -> tuple[TrajectoryRecord, list[TurnRecord]]:
    chat = [*prompt, {"role": "user", "content": "go"}]
    ids = CharacterTokenizer().render_chat(chat)
    messages = [Message(each["role"], each["content"], token_array()) for each in chat]
    messages[-1].token_ids = ids
    sample = Sample(
        prompt=Prompt(
            task_index=0, task_name="env", idx=0, messages=tuple(messages), token_ids=ids, metadata={},
            stop_strings=None, sampling={},
        ),
        rollout_index=0,
        seed=1,
        partial=Partial(turns) if turns else None,
    )  # fmt: skip
    found: list[Any] = []
    journal: list[TurnRecord] = []

    async def sink(result: Any) -> None:
        found.append(result)

    async def turn_sink(turn: TurnRecord) -> None:
        journal.append(decode_line(encode_line(turn), TurnRecord, where="turn"))

    async with runners({"env": environment}) as made:
        rollout = rollout_of(
            made,
            policy=engine,
            turn_sink=turn_sink,
            max_turns=3,
            max_sequence_length=len(ids) + window,
            sampling=SamplingParameters(max_tokens=6),
        )
        await run_rollout(rollout, [sample], sink)
    (result,) = found
    assert isinstance(result, TrajectoryRecord), result
    return result, journal


def _stored(record: TrajectoryRecord) -> list[TrajectoryRecord]:
    """The record as it is read from a line, and from Parquet."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "shard.parquet"
        write_parquet(path, [record])
        (row,) = read_parquet(path, where="x", unreadable=lambda error: pytest.fail(str(error)))
    return [decode_line(encode_line(record), TrajectoryRecord, where="x"), row]


@settings(max_examples=examples(150), deadline=None)
@given(
    prompt=prompts,
    reset=st.lists(_says("r", "", "begin"), max_size=2),
    script=scripts,
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    window=st.integers(8, 160),
    resumed=st.integers(0, 3),
)
def test_what_is_marked_is_what_the_engine_sampled(
    prompt: list[dict[str, str]],
    reset: list[dict[str, str]],
    script: list[list[dict[str, str]]],
    lengths: list[int],
    window: int,
    resumed: int,
) -> None:
    async def play() -> tuple[TrajectoryRecord, EngineLog]:
        environment, engine = Talker(reset, script), Engine(lengths)
        record, journal = await _play(environment, prompt, engine, window, None)
        kept = journal[:resumed]
        if not kept:
            return record, engine.log
        # Killed after these turns.
        engine.log.calls = engine.log.calls[: len(kept)]
        record, _ = await _play(environment, prompt, engine, window, kept)
        return record, engine.log

    record, log = asyncio.run(play())
    log.calls = [call for call in log.calls if call[1]]
    for stored in [record, *_stored(record)]:
        check_marks(stored, log, CharacterTokenizer().decode)


async def test_an_opponent_who_speaks_as_an_assistant_is_not_learned_from() -> None:
    engine = Engine([4])
    opponent = Talker([], [[{"role": "assistant", "content": "OPPONENT MOVES e4\n"}]] * 2)
    record, _ = await _play(opponent, [{"role": "assistant", "content": "an example"}], engine, 200, None)
    assert [message.sampled for message in record.messages] == [False, False, True, False, True, False]
    assert (record.tokens.generated, len(engine.log.calls)) == (8, 2)
    check_marks(record, engine.log, CharacterTokenizer().decode)
