"""What the policy's engine sampled, and nothing else, is marked for learning: in sessions of agents.

Real HTTP, vLLM's API over a simulated engine, and agents that do to their history whatever agents do.
"""

from __future__ import annotations

import asyncio
import os
import random
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import openai
import pytest

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.data.record import FailureRecord, TrajectoryRecord, decode_line, encode_line
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.environments.agents import AgentEpisode
from kuberoll_workers.policy.interface import GenerationRequest, GenerationResult
from kuberoll_workers.rollouts.settings import RetryPolicy
from kuberoll_workers.serving.openai_api.application import import_vllm
from tests.policy.openai_serving import serving_openai, tokenizer_with_ends
from tests.rollouts import fakes
from tests.rollouts.agent_functions import client_of
from tests.rollouts.marks import EngineLog, check_marks
from tests.rollouts.test_agents import Fleet
from tests.serving.test_openai_api import END, Scripted

pytestmark = pytest.mark.slow

HERE = "tests.rollouts.test_agent_authorship"
SESSIONS = int(os.environ.get("KUBEROLL_TEST_CALL_TREES", "25"))
"""Number of random sessions."""
ABORTED = 666
"""Seed of requests whose response the engine aborts, as often as it is to."""


class Sampling(Scripted):
    """Samples random ids, and keeps its own account of it; of an aborted response there is none.

    Attributes:
        aborts: Number of responses that it is still to abort.
        aborted: Number of responses that it has aborted.
    """

    def __init__(self, place: Path) -> None:
        super().__init__(tokenizer=place, window=4096)
        self.log = EngineLog()
        self.aborts = self.aborted = 0
        self._random = random.Random(5)
        tokenizer = HuggingFaceTokenizer.load(str(place))
        # Texts that come back in the same tokens, as nearly all do.
        self._words = [token for token in range(100, 1400) if tokenizer.decode([token]).strip().isalpha()]

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        ids = token_array(self._random.sample(self._words, self._random.randint(1, 6)))
        if self._random.random() < 0.7:
            ids.append(END)
        prompt = tuple(request.token_ids)
        aborted = request.sampling.seed == ABORTED and self.aborts > 0
        logprobs = array("f", [-self._random.random() for _ in ids])
        if aborted:
            self.aborts -= 1
            self.aborted += 1
            ids.append(99)
            logprobs.append(-1.0)
        else:
            self.log.add(prompt, ids, logprobs)
        return GenerationResult(
            token_ids=ids,
            logprobs=logprobs,
            finish_reason="abort" if aborted else "stop" if ids[-1] == END else "length",
            policy_versions=(("7", 0, len(ids)),),
        )


ENGINE: ContextVar[Sampling] = ContextVar("ENGINE")


async def wander(episode: AgentEpisode) -> float:
    """Do with the history what the row's seed says."""
    engine = ENGINE.get()
    # Of an attempt before this one nothing is kept.
    engine.log = EngineLog()
    draw = random.Random(episode.metadata["draw"])
    history: list[Any] = list(episode.messages)
    async with client_of(episode) as client:

        async def ask(messages: list[Any], **more: Any) -> str:
            answer = await client.chat.completions.create(model=episode.model, messages=messages, **more)
            return answer.choices[0].message.content or ""

        for number in range(draw.randint(1, 7)):
            history = changed(history, draw)
            if history[-1]["role"] != "user":
                history.append({"role": "user", "content": f"and {number}?"})
            way = draw.choice(("plain", "plain", "prefill", "continue", "stream", "several", "aborted", "given up"))
            if way == "stream":
                stream = await client.chat.completions.create(model=episode.model, messages=history, stream=True)
                said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            elif way in ("prefill", "continue"):
                history.append({"role": "assistant", "content": "I begin"})
                goes_on = {"continue_final_message": True, "add_generation_prompt": False}
                said = await ask(history, extra_body=goes_on if way == "continue" else {})
                if draw.random() < 0.5:
                    said = history.pop()["content"] + said
            elif way == "several":
                said = await ask(history, n=2)
            elif way in ("aborted", "given up"):
                try:
                    said = await ask(history, seed=ABORTED)
                except openai.InternalServerError:
                    if way == "given up":
                        continue
                    said = await ask(history, seed=ABORTED)
            else:
                said = await ask(history)
            history.append({"role": "assistant", "content": said})
    return 1.0


def changed(history: list[Any], draw: random.Random) -> list[Any]:
    """A history to go on from: the same, or with a message of one's own, or without some, or edited."""
    way = draw.choice(("same", "same", "same", "written", "cut", "edited"))
    place = draw.randrange(len(history))
    if way == "written":
        return [*history, {"role": "assistant", "content": draw.choice(("by hand", history[-1]["content"]))}]
    if way == "cut":
        return history[: place + 1]
    if way == "edited":
        edited = {**history[place], "content": draw.choice(("another", f"{history[place]['content']} more"))}
        return [*history[:place], edited, *history[place + 1 :]]
    return list(history)


async def prefill(episode: AgentEpisode) -> float:
    """The second request ends with a message of the agent's own."""
    engine = ENGINE.get()
    engine.log = EngineLog()
    messages: list[Any] = list(episode.messages)
    async with client_of(episode) as client:
        for beginning in (None, "My long and hand-written beginning"):
            if beginning is not None:
                messages += [{"role": "user", "content": "and?"}, {"role": "assistant", "content": beginning}]
            answer = await client.chat.completions.create(model=episode.model, messages=messages)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    return 1.0


async def cut_short(episode: AgentEpisode) -> float:
    """Take whatever comes for an answer."""
    ENGINE.get().log = EngineLog()
    async with client_of(episode) as client:
        messages: Any = list(episode.messages)
        await client.chat.completions.create(model=episode.model, messages=messages)
        try:
            await client.chat.completions.create(model=episode.model, messages=messages, seed=ABORTED)
        except openai.InternalServerError:
            return 0.0
    return 1.0


async def cut_short_stream(episode: AgentEpisode) -> float:
    """Take whatever has come of a stream for an answer."""
    ENGINE.get().log = EngineLog()
    async with client_of(episode) as client:
        messages: Any = list(episode.messages)
        await client.chat.completions.create(model=episode.model, messages=messages)
        try:
            stream = await client.chat.completions.create(
                model=episode.model, messages=messages, seed=ABORTED, stream=True
            )
            async for _ in stream:
                pass
        except openai.APIError:
            return 0.0
    return 1.0


async def broken_by_it(episode: AgentEpisode) -> float:
    """Fail where an answer does not come."""
    if await cut_short(episode) == 0.0:
        raise ValueError("no answer")
    return 1.0


async def ask_again(episode: AgentEpisode) -> float:
    """Ask again where an answer does not come."""
    while await cut_short(episode) == 0.0:
        pass
    return 1.0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_with_ends(tmp_path_factory.mktemp("tokenizer"))


@asynccontextmanager
async def sampling_fleet(place: Path) -> AsyncIterator[tuple[Fleet, Sampling]]:
    engine = Sampling(place)
    await engine.start()
    ENGINE.set(engine)
    # Seconds, on a busy machine more than a client waits for its first answer.
    await asyncio.to_thread(import_vllm)
    async with serving_openai(engine, tool_parser="hermes") as url:
        yield Fleet(url, engine, HuggingFaceTokenizer.load(str(place))), engine
    await engine.shutdown()


async def _rolled(fleet: Fleet, function: str, *draws: int, **changes: Any) -> list[Any]:
    samples = [fakes.sample(index, prompt="hi", metadata={"draw": draw}) for index, draw in enumerate(draws)]
    changes = {"concurrency": 1, "max_sequence_length": 4096, "max_turns": 64, **changes}
    return await fleet.roll(samples, {"entrypoint": f"{HERE}:{function}"}, **changes)


async def test_what_is_marked_is_what_the_engine_sampled(place: Path) -> None:
    kinds = set()
    async with sampling_fleet(place) as (fleet, engine):
        for draw in range(SESSIONS):
            engine.aborts = 2
            (record,) = await _rolled(fleet, "wander", draw)
            if isinstance(record, FailureRecord):
                assert "there is no trajectory" in record.cause
                continue
            for stored in (record, decode_line(encode_line(record), TrajectoryRecord, where="x")):
                check_marks(stored, engine.log, fleet.tokenizer.decode)
            kinds |= {*(record.continuity or {}), *(message.role for message in record.messages if not message.sampled)}
            kinds |= {"branches"} if record.branches else set()
        assert engine.aborted
    assert {"clean", "forked", "assistant", "user", "branches"} <= kinds


async def test_a_prefill_is_context_and_so_is_what_was_written_by_hand(place: Path) -> None:
    async with sampling_fleet(place) as (fleet, engine):
        (record,) = await _rolled(fleet, "prefill", 0)
    assert isinstance(record, TrajectoryRecord)
    assert record.tokens.generated == sum(len(response) for _, response in engine.log.calls)
    assert [(message.role, message.sampled) for message in record.messages if message.turn][:5] == [
        ("assistant", True), ("user", False), ("assistant", False), ("assistant", True), ("environment", False),
    ]  # fmt: skip
    check_marks(record, engine.log, fleet.tokenizer.decode)


@pytest.mark.parametrize("function", ["cut_short", "cut_short_stream", "broken_by_it"])
async def test_part_of_a_response_is_no_response(place: Path, function: str) -> None:
    async with sampling_fleet(place) as (fleet, engine):
        engine.aborts = 1
        retries = RetryPolicy(backoff_seconds=0.0, environment_attempts=1)
        (record,) = await _rolled(fleet, function, 0, retries=retries)
        # The agent began again, through no fault of its own, and the engine finished both responses.
        assert isinstance(record, TrajectoryRecord)
        assert (record.total_reward, len(engine.log.calls)) == (1.0, 2)
        check_marks(record, engine.log, fleet.tokenizer.decode)
        assert not any(99 in message.token_ids for message in record.messages)


async def test_an_agent_that_asks_again_goes_on(place: Path) -> None:
    async with sampling_fleet(place) as (fleet, engine):
        engine.aborts = 2
        (record,) = await _rolled(fleet, "ask_again", 0)
    assert isinstance(record, TrajectoryRecord)
    # In one session: the first question three times, and the answer to the second one.
    assert (engine.aborted, sum((record.continuity or {}).values())) == (2, 4)


async def test_an_engine_that_finishes_no_response_is_at_fault_and_not_the_agent(place: Path) -> None:
    async with sampling_fleet(place) as (fleet, engine):
        engine.aborts = 1 << 20
        retries = RetryPolicy(backoff_seconds=0.0, environment_attempts=1)
        (failed,) = await _rolled(fleet, "cut_short", 0, retries=retries)
    assert isinstance(failed, FailureRecord)
    assert (failed.kind, failed.stage) == ("infrastructure", "environment")
    assert failed.cause.startswith("the engine failed in the middle of 1 of the responses")
