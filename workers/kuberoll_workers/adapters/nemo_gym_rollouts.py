"""Trajectories of NeMo Gym's agent servers: the request of a sample, and the calls in its answer as turns."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import orjson

from kuberoll_workers.adapters.nemo_gym_results import (
    GymCall,
    calls_of,
    chats_of,
    check_components,
    is_cut,
    output_of,
    reward_of,
    tool_calls_of,
    without_tokens,
)
from kuberoll_workers.data.call_prefixes import CallPrefixes, paths
from kuberoll_workers.data.gym_requests import PARAMS, ROLLOUT, STATE, TASK, request_params
from kuberoll_workers.data.prompts import Sample
from kuberoll_workers.data.sampling import distribution_of
from kuberoll_workers.environments.interface import ChatMessage
from kuberoll_workers.environments.outcome import StepOutcome
from kuberoll_workers.players.session_trajectories import agent_trajectory
from kuberoll_workers.policy.agent_sessions import ClosedSession, SessionMessage, SessionPath, SessionTiming
from kuberoll_workers.policy.interface import SamplingParameters
from kuberoll_workers.rollouts.settings import RolloutSettings, sampling_of
from kuberoll_workers.rollouts.trajectory import Trajectory

Decoder = Callable[[Sequence[int]], str]
"""Converts token ids to text."""

_SAMPLING: Final = frozenset({*SamplingParameters.__struct_fields__, "max_output_tokens", "max_completion_tokens"})


class GymRequest(msgspec.Struct, kw_only=True, frozen=True):
    """A rollout for an agent server.

    Attributes:
        named: True if the row itself says which agent it is for; otherwise it may be any.
        row: Body of the request.
    """

    named: bool
    row: dict[str, Any]

    @classmethod
    def decode(cls, plain: dict[str, Any]) -> GymRequest:
        """The request of `gym_request`."""
        return msgspec.convert(plain, cls)


class GymAnswer(msgspec.Struct, kw_only=True, frozen=True):
    """What an agent server has answered.

    Attributes:
        agent: Name of the agent.
        result: Its answer.
    """

    agent: str
    result: dict[str, Any]

    def encode(self) -> dict[str, Any]:
        """The answer as plain data."""
        return {"agent": self.agent, "result": self.result}


def gym_request(sample: Sample, settings: RolloutSettings) -> dict[str, Any]:
    """What an agent server is sent for a sample: the row, with the sampling that the job and the row decide.

    As in Gym's own rollout collection, the row has the numbers of its task and its rollout, and settings beyond the
    Responses API, such as the seed, are in `metadata.extra_body`, which its model servers pass on.

    Raises:
        ValueError: The sample's prompt has no row for agent servers.
    """
    prompt = sample.prompt
    if prompt.request is None:
        raise ValueError(f"the prompt of task {prompt.task_index} has no row for agent servers of NeMo Gym")
    given = prompt.request
    number = prompt.task_index if given.number is None else given.number
    fields = {name: value for name, value in given.fields.items() if name != "stop_strings"}
    sampling = sampling_of(settings.sampling, prompt.sampling)
    if prompt.stop_strings is not None:
        sampling = msgspec.structs.replace(sampling, stop=prompt.stop_strings)
    numbers = {TASK: number, ROLLOUT: sample.rollout_index}
    row = {**fields, PARAMS: _params(fields[PARAMS], sampling, sample.seed), **numbers}
    return {"named": given.named, "row": row}


def _params(given: Mapping[str, Any], sampling: SamplingParameters, seed: int | None) -> dict[str, Any]:
    params = {name: value for name, value in given.items() if name not in _SAMPLING}
    metadata = params.get("metadata")
    if isinstance(metadata, dict) and metadata.get("extra_body"):
        extra = {name: value for name, value in orjson.loads(metadata["extra_body"]).items() if name not in _SAMPLING}
        params["metadata"] = {name: value for name, value in metadata.items() if name != "extra_body"}
        params |= extra
    # Those that are as by default are not sent, but for the three that the API has itself.
    own: dict[str, Any] = msgspec.to_builtins(sampling)
    own |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": seed}
    return request_params({**params, **own})


def gym_trajectory(
    sample: Sample,
    settings: RolloutSettings,
    outcome: StepOutcome,
    *,
    row: Mapping[str, Any],
    began: float,
    ended: float,
    decode: Decoder,
) -> Trajectory:
    """The trajectory in an agent server's answer: its calls as turns, and those beside the first path as branches.

    When a call was made is not known: its time is the environment's, and all turns end with the rollout. Neither are
    the versions of the policy.

    Args:
        outcome: Its metadata is a `GymAnswer`.
        row: The request's body.
        began, ended: Unix times of the rollout.

    Raises:
        StepInvalid, RowFault: The answer cannot be learned from; the message names the field.
    """
    answer = msgspec.convert(outcome.metadata, GymAnswer)
    result = answer.result
    reward = reward_of(result, "the result")
    calls, items = calls_of(result), output_of(result)
    parents, begins, continuity = _linked(calls)
    chains = list(paths(parents))
    told = result.get(PARAMS)
    # With what the environment's reset has added.
    given = told if isinstance(told, Mapping) else row[PARAMS]
    reads = [_read(calls, items, number, given) for number in range(len(calls))]
    cut = is_cut(result)
    tools = None if sample.prompt.tools is None else [dict(tool) for tool in sample.prompt.tools]
    learned: set[int] = set()
    # What its calls were asked for; agents say nothing of what else they may have set.
    sampling = distribution_of(sampling_of(settings.sampling, sample.prompt.sampling))
    closed = ClosedSession(
        opened_at=began,
        calls=len(calls),
        trajectories=[
            _path(
                chain,
                calls,
                items,
                parents,
                begins,
                reads,
                learned,
                tools,
                cut=cut,
                ended=ended,
                decode=decode,
                sampling=sampling,
            )
            for chain in chains
        ],
        continuity=continuity,
    )
    trailing = chats_of(items[calls[-1].item + 1 :]) if len(calls) - 1 in chains[0] else None
    last = (trailing or [{"role": outcome.role, "content": outcome.content}])[-1]
    end = dataclasses.replace(
        outcome,
        role=last["role"],
        content=last["content"],
        messages=tuple(trailing or ()),
        reward=reward,
        reward_parts=check_components(result, reward, "the result"),
        metadata={**(sample.prompt.metadata or {}), STATE: _state(answer, row, calls, chains)},
    )
    trajectory = agent_trajectory(sample, settings, closed, end, decode)
    if cut:
        trajectory.stop_reason = "truncated"
    elif result.get("truncated") is True:
        # Gym's agents for steps say so where they have taken all that they may.
        trajectory.stop_reason = "max_turns"
    else:
        trajectory.stop_reason = "terminated"
    return trajectory


def _linked(calls: Sequence[GymCall]) -> tuple[list[int | None], list[int], dict[str, int]]:
    """The parent of each call, the number of ids that it has from there, and how the calls continue each other."""
    prefixes = CallPrefixes()
    parents: list[int | None] = []
    begins = []
    continuity: Counter[str] = Counter()
    for number, call in enumerate(calls):
        parent, begun = prefixes.parent(call.prompt)
        continuity["clean" if parent is not None else "forked" if number else "new"] += 1
        parents.append(parent)
        begins.append(begun)
        prefixes.add(number, call.prompt, call.response)
    return parents, begins, dict(continuity)


def _read(
    calls: Sequence[GymCall], items: Sequence[Any], number: int, given: Mapping[str, Any]
) -> list[ChatMessage] | None:
    """Messages that a call read after those of the call before it; of the first call, all."""
    before = items[calls[number - 1].item + 1 : calls[number].first] if number else items[: calls[0].first]
    chats = chats_of(before)
    if number or chats is None:
        return chats
    prompt = given.get("input")
    asked = chats_of([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or [])
    if asked is None:
        return None
    instructions = given.get("instructions")
    system = [{"role": "system", "content": instructions}] if isinstance(instructions, str) else []
    return [*system, *asked, *chats]


def _text_beside(items: Sequence[Any]) -> str:
    """What a response says beside its calls, with its thoughts."""
    chats = chats_of(items)
    return chats[0]["content"] if chats else ""


def _path(
    chain: Sequence[int],
    calls: Sequence[GymCall],
    items: Sequence[Any],
    parents: Sequence[int | None],
    begins: Sequence[int],
    reads: Sequence[list[ChatMessage] | None],
    learned: set[int],
    tools: list[dict[str, Any]] | None,
    *,
    cut: bool,
    ended: float,
    decode: Decoder,
    sampling: dict[str, Any],
) -> SessionPath:
    messages = []
    for number in chain:
        call = calls[number]
        if read := call.prompt[begins[number] :].tolist():
            # The messages between two calls are those that the second read only if it continues the first.
            follows = parents[number] == (number - 1 if number else None)
            chat = reads[number] if follows else None
            messages.append(SessionMessage(role="context", content=decode(read), token_ids=read, chat=chat or None))
        length = cut and number == len(calls) - 1
        said = items[call.first : call.item + 1]
        called = tool_calls_of(said)
        messages.append(
            SessionMessage(
                role="assistant",
                content=decode(call.response),
                token_ids=call.response.tolist(),
                logprobs=call.logprobs.tolist(),
                learn=number not in learned,
                tool_calls=called or None,
                text=_text_beside(said) if called else None,
                finish_reason="length" if length else "stop",
                sampling=sampling,
            )
        )
        learned.add(number)
    timing = SessionTiming(generation_seconds=[0.0] * len(chain), ended_at=[ended] * len(chain))
    return SessionPath(messages=messages, timing=timing, tools=tools)


def _state(
    answer: GymAnswer, row: Mapping[str, Any], calls: Sequence[GymCall], chains: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """What is kept of an answer: all of it but the ids, which the messages have, and what the row had already.

    `echoed` has the names of these fields; `calls` for each call the number of the item that had its ids, of its path,
    and of its turn in that.
    """
    places: dict[int, list[int]] = {}
    for path, chain in enumerate(chains):
        for turn, number in enumerate(chain, start=1):
            places.setdefault(number, [calls[number].item, path, turn])
    told = {name: value for name, value in answer.result.items() if name != "response"}
    echoed = [name for name, value in told.items() if name in row and row[name] == value]
    return {
        "agent": answer.agent,
        "verification": {name: value for name, value in told.items() if name not in echoed},
        "echoed": echoed,
        "response": without_tokens(answer.result["response"]),
        "calls": [places[number] for number in range(len(calls))],
    }
