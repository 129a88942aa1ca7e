"""NeMo Gym's rows: a rollout with its response in exact tokens, the input that it was made from, and a failure."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from kuberoll_workers.analysis.export.formats import NEMO_GYM, Format
from kuberoll_workers.analysis.export.samplings import known_sampling
from kuberoll_workers.analysis.export.views import spoken, token_versions
from kuberoll_workers.data.gym_requests import (
    AGENT,
    FAILURE,
    PARAMS,
    ROLLOUT,
    STATE,
    TASK,
    TERMINAL,
    agent_ref,
    request_params,
)
from kuberoll_workers.data.messages import PROMPT_TURN, Message, chat_message, token_array
from kuberoll_workers.data.record import FailureRecord, TrajectoryRecord
from kuberoll_workers.data.response_items import input_items, output_items, response_of, tool_items

OWN = "kuberoll"
"""Field of a rollout with what Gym has no name for."""

_ROLES = frozenset({"user", "system", "developer"})


def row_of_record(record: TrajectoryRecord | FailureRecord) -> dict[str, Any]:
    """The row of a task, as far as a trajectory tells it: prompt, tools and agent.

    Its fields are there if its environment was a server of NeMo Gym, which keeps them. The state of other environments
    is that of the end, which is no input.
    """
    params: dict[str, Any] = {"input": input_items([chat_message(message) for message in _prompt(record.messages)])}
    if isinstance(record, TrajectoryRecord) and record.tools is not None:
        params["tools"] = tool_items(record.tools)
    metadata = record.metadata or {}
    fields = {name: value for name, value in metadata.items() if name != STATE} if STATE in metadata else {}
    agent = (metadata.get(STATE) or {}).get("agent") or record.task_name
    return {**fields, AGENT: agent_ref(agent), PARAMS: params}


def materialized(
    record: TrajectoryRecord | FailureRecord, row: Mapping[str, Any], *, number: int | None = None
) -> dict[str, Any]:
    """The input of one rollout: its task's row, with Gym's numbers and the seed that it was sampled with.

    Args:
        row: From `row_of_dataset` or `row_of_record`.
        number: Number of the task; None for the run's own.
    """
    params = {name: value for name, value in row[PARAMS].items() if name != "seed"}
    if record.seed is not None:
        params = request_params({**params, "seed": record.seed})
    numbers = {TASK: record.task_index if number is None else number, ROLLOUT: record.rollout_index}
    return {**row, PARAMS: params, **numbers}


def rollout(record: TrajectoryRecord, given: Mapping[str, Any], *, model: str = "policy") -> dict[str, Any]:
    """A finished rollout: its input, what a server of NeMo Gym found out about it, its response and its reward.

    That of an agent server is what the server has answered.

    Args:
        given: Its materialized input.
        model: Name of the policy.
    """
    metadata = record.metadata or {}
    state = metadata.get(STATE) or {}
    found, answered = state.get("verification") or {}, state.get("response")
    own: dict[str, Any] = {
        "stop_reason": record.stop_reason,
        "rewards": record.rewards,
        "reward_parts": record.reward_parts,
        "group_reward": record.group_reward,
        "token_source": record.token_source,
        "sampling": known_sampling(record),
        "policy_versions": [token_versions(message) for message in record.messages if message.sampled],
        "idx": record.idx,
        "metadata": record.metadata,
    }
    if answered is None:
        return {**given, **found, "response": _response(record, model), "reward": record.total_reward, OWN: own}
    own["metadata"] = {name: value for name, value in metadata.items() if name != STATE}
    response = with_tokens(record, answered, state["calls"])
    kept = {name: given[name] for name in (*state["echoed"], TASK, ROLLOUT, AGENT) if name in given}
    # With the reward as it was: the total is rounded to float32.
    return {**kept, **found, "response": response, OWN: own}


def with_tokens(
    record: TrajectoryRecord, response: Mapping[str, Any], calls: Sequence[tuple[int, int, int]]
) -> dict[str, Any]:
    """A response of an agent server with the token ids that it had, in the items that had them.

    Args:
        calls: For each call the number of its item, of its path (0: the trajectory, then its branches) and of its turn.
    """
    items = [dict(item) for item in response["output"]]
    places = {(path, turn): item for item, path, turn in calls}
    for path, messages in enumerate([record.messages, *(branch.messages for branch in record.branches or ())]):
        context = token_array()
        for message in messages:
            if message.sampled and (number := places.get((path, message.turn))) is not None:
                items[number] |= _token_fields(context, message)
            context.extend(message.token_ids)
    return {**response, "output": items}


def _token_fields(context: array[int], message: Message) -> dict[str, Any]:
    return {
        "prompt_token_ids": context[:],
        "generation_token_ids": message.token_ids,
        "generation_log_probs": message.logprobs,
    }


def failure(record: FailureRecord, given: Mapping[str, Any], *, model: str = "policy") -> dict[str, Any]:
    """A failed rollout, as Gym's file of failures has it: with its class, and never to be tried again.

    It has no reward. The run has tried it as often as it may, and its failure is final there, too.
    """
    own = {"stage": record.stage, "tries": record.tries, "row": record.row, "idx": record.idx}
    return {
        **given,
        "response": _response(record, model),
        "error_message": record.cause,
        FAILURE: record.kind,
        TERMINAL: True,
        OWN: own,
    }


def rollout_of_record(record: TrajectoryRecord, *, model: str = "policy") -> dict[str, Any]:
    """A finished rollout whose input is what the trajectory tells of it."""
    return rollout(record, materialized(record, row_of_record(record)), model=model)


def numbers_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of a rollout that Gym's statistics are over: its reward, its other numeric fields, and its usage."""
    usage = result["response"].get("usage") or {}
    flat = {**{name: value for name, value in result.items() if name not in (TASK, ROLLOUT)}, **usage}
    # Truth values are numbers there, too.
    return {name: int(value) if isinstance(value, bool) else value for name, value in flat.items() if _number(value)}


def _number(value: Any) -> bool:
    return isinstance(value, int | float)


def _prompt(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if message.turn == PROMPT_TURN]


def _response(record: TrajectoryRecord | FailureRecord, model: str) -> dict[str, Any]:
    messages = _spoken(record)
    exact = isinstance(record, TrajectoryRecord) and record.token_source == "engine"
    context = token_array()
    items: list[dict[str, Any]] = []
    read = written = 0
    for message in messages:
        if message.turn != PROMPT_TURN:
            made = _items(message)
            if message.sampled:
                read, written = read + len(context), written + len(message.token_ids)
                if exact and message.logprobs is not None:
                    # Of the whole turn, on its last item, where Gym's model servers put them.
                    made[-1] |= _token_fields(context, message)
            items += made
        context.extend(message.token_ids)
    ends = record.timing.ended_at if isinstance(record, TrajectoryRecord) else []
    cut = any(message.truncated for message in messages[-1:] if message.sampled)
    return {
        **response_of(items),
        "id": f"resp_{record.task_index}_{record.rollout_index}",
        "created_at": int(ends[-1] or 0) if ends else 0,
        "model": model,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "tools": tool_items(record.tools) if isinstance(record, TrajectoryRecord) and record.tools is not None else [],
        "usage": {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + written,
        },
    }


def _spoken(record: TrajectoryRecord | FailureRecord) -> Sequence[Message]:
    return spoken(record) if isinstance(record, TrajectoryRecord) else record.messages


def _items(message: Message) -> list[dict[str, Any]]:
    chat = chat_message(message)
    if message.sampled:
        named = output_items([chat])
        for number, item in enumerate(named):
            if "id" in item:
                item["id"] = f"{item['id'].partition('_')[0]}_{message.turn}_{number}"
        return named
    if message.role == "tool" and chat.get("tool_call_id"):
        return output_items([chat])
    # An assistant's messages here are the policy's.
    role = message.role if message.role in _ROLES else "user"
    return [{"type": "message", "role": role, "content": message.content}]


FORMAT = Format(name=NEMO_GYM, containers=("jsonl",), row=lambda record, *_: rollout_of_record(record), tool_role=False)
