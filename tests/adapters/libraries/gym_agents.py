"""A policy that decides by what it reads, behind an endpoint that NeMo Gym's model server calls, and Gym's agents."""

from __future__ import annotations

import asyncio
import json
import re
import zlib
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal

from kuberoll_api.model.generation import SimulatedEngine
from kuberoll_workers.data.messages import LOGPROB_TYPE, token_array
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.policy.interface import GenerationRequest, GenerationResult
from kuberoll_workers.serving.engines.simulated import Simulated
from tests.adapters.libraries.foreign import packages, server
from tests.adapters.libraries.serve_nemo_gym_agents import AGENTS
from tests.adapters.libraries.test_nemo_gym import REQUIREMENTS, examples
from tests.policy.openai_serving import serving_openai, tokenizer_with_ends

WINDOW = 4096
KEY = "a-key-of-the-policy"


class Deciding(Simulated):
    """Answers the same prompt alike, whatever the seed: it plays blackjack, answers questions and asks for the weather.

    Attributes:
        read: Ids of all prompts that it was asked.
        limit: Number of requests that it answers; further ones wait until `released` is set.
    """

    def __init__(self, tokenizer: Path) -> None:
        super().__init__(
            model="none",
            tokenizer=str(tokenizer),
            settings=SimulatedEngine.model_validate({"responses": ["-"]}),
            engine_args={"max_model_len": WINDOW},
        )
        self._own = HuggingFaceTokenizer.load(str(tokenizer))
        self.read: set[tuple[int, ...]] = set()
        self._asked = 0
        self.limit = 1 << 30
        self.released = asyncio.Event()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        prompt = self._own.decode_with_special_tokens(request.token_ids)
        self.read.add(tuple(request.token_ids))
        self._asked += 1
        if self._asked > self.limit:
            await self.released.wait()
        ids = self._own.encode(decision(prompt))[: request.sampling.max_tokens]
        return GenerationResult(
            token_ids=token_array(ids),
            logprobs=array(LOGPROB_TYPE, [-(number % 7) / 8 for number in range(len(ids))]),
            finish_reason="stop",
            policy_versions=(("0", 0, len(ids)),),
        )

    def hold_after(self, answers: int) -> None:
        """Answer so many requests more, and let others wait."""
        self.released.clear()
        self.limit = self._asked + answers

    def release(self) -> None:
        self.limit = 1 << 30
        self.released.set()


def decision(prompt: str) -> str:
    """What the policy says to a prompt."""
    draw = zlib.crc32(prompt.encode())
    if "Deal me in" in prompt:
        value = int(re.findall(r"\] = (\d+)", prompt)[-1])
        return "<action>hit</action>" if value < 12 + draw % 6 else "I stay. <action>stand</action>"
    if "get_weather" in prompt:
        if "is cold" in prompt:
            return "Take a coat."
        # Not as the template writes it.
        call = '<tool_call>{"arguments":  {"city": "%s"}, "name": "get_weather"}</tool_call>'
        return "I look. " + "".join(call % city for city in ["Bern", "Rome"][: 1 + draw % 2])
    return f"It is \\boxed{{{'ABCDEFGHIJ'[draw % 10]}}}"


@dataclass(frozen=True)
class World:
    """Gym's servers and the policy that they call.

    Attributes:
        head: Address of the head server.
        policy: Address of the policy, without `/v1`.
        tokenizer: Directory of the policy's tokenizer.
        nemo_gym: The package.
        portal: The policy's event loop.
    """

    head: str
    policy: str
    tokenizer: Path
    nemo_gym: Path
    engine: Deciding
    portal: BlockingPortal

    def hold_after(self, answers: int) -> None:
        self.portal.call(self.engine.hold_after, answers)

    def release(self) -> None:
        self.portal.call(self.engine.release)


@contextmanager
def world(directory: Path, *arguments: str) -> Iterator[World]:
    """Gym's agents over a policy.

    Args:
        arguments: Further ones of `serve_nemo_gym_agents.py`.
    """
    nemo_gym = packages("nemo-gym-0.4.0", REQUIREMENTS)
    (place := directory / "tokenizer").mkdir()
    tokenizer_with_ends(place)
    engine = Deciding(place)
    with ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal())
        portal.call(engine.start)
        stack.callback(portal.call, engine.shutdown)
        url = stack.enter_context(
            portal.wrap_async_context_manager(serving_openai(engine, tool_parser="hermes", key=KEY))
        )
        script = ["serve_nemo_gym_agents.py", f"{url}/v1", KEY, *arguments]
        head = stack.enter_context(server(*script, path=nemo_gym, log=directory / "gym.log"))
        yield World(head, url, place, nemo_gym, engine, portal)


def rows_of(nemo_gym: Path, count: int) -> list[dict[str, Any]]:
    """The package's first example rows of each agent, which they name."""
    return [
        {**row, "agent_ref": {"type": "responses_api_agents", "name": agent}}
        for agent, (_, resources) in AGENTS.items()
        for row in examples(nemo_gym, resources)[:count]
    ]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path
