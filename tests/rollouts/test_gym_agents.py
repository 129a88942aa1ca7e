"""Requests to NeMo Gym's agent servers, and their answers as trajectories."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.adapters.nemo_gym_rollouts import GymAnswer, gym_request, gym_trajectory
from kuberoll_workers.analysis.export.nemo_gym import rollout_of_record, with_tokens
from kuberoll_workers.data.prompts import AgentRow, Sample
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.environments.outcome import RowFault, StepInvalid, StepOutcome
from kuberoll_workers.policy.interface import SamplingParameters
from tests.rollouts import fakes

ROW: dict[str, Any] = {
    "responses_create_params": {"input": [{"role": "user", "content": "hi"}]},
    "agent_ref": {"type": "responses_api_agents", "name": "agent"},
    "expected": 4,
}


def sample(row: dict[str, Any] = ROW, *, number: int | None = None, named: bool = True, **changes: Any) -> Sample:
    made = fakes.sample(3, 1, prompt="hi", metadata={"expected": 4}, **changes)
    request = AgentRow(fields=row, number=number, named=named)
    return dataclasses.replace(made, prompt=dataclasses.replace(made.prompt, request=request))


def row_of(params: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**ROW, "responses_create_params": {**ROW["responses_create_params"], **params}, **changes}


def requested(made: Sample, **settings: Any) -> dict[str, Any]:
    found: dict[str, Any] = gym_request(made, fakes.settings(**settings))["row"]
    return found


def test_a_request_is_the_row_with_its_numbers_and_the_sampling_of_the_job() -> None:
    found = requested(sample(), sampling=SamplingParameters(max_tokens=50, temperature=0.5, top_k=3))
    params = found.pop("responses_create_params")
    extra = json.loads(params["metadata"].pop("extra_body"))
    assert extra == {"top_k": 3, "seed": 7}
    assert params == {
        "input": [{"role": "user", "content": "hi"}],
        "temperature": 0.5,
        "top_p": 1.0,
        "max_output_tokens": 50,
        "metadata": {},
    }
    assert found == {"agent_ref": ROW["agent_ref"], "expected": 4, "_ng_task_index": 3, "_ng_rollout_index": 1}


def test_a_row_s_own_settings_are_those_that_the_dataset_has_taken_from_it() -> None:
    given_params = {
        "temperature": 0.9,
        "parallel_tool_calls": False,
        "metadata": {"note": "mine", "extra_body": '{"top_k": 5, "chat_template_kwargs": {"a": 1}}'},
    }
    made = sample(row_of(given_params, stop_strings=["x"]), number=12, stop_strings=("x",), sampling={"top_k": 5})
    made = dataclasses.replace(made, seed=None)
    found = requested(made)
    assert found["_ng_task_index"] == 12
    assert "stop_strings" not in found
    params = found["responses_create_params"]
    assert params["temperature"] == 1.0
    assert params["parallel_tool_calls"] is False
    assert params["metadata"]["note"] == "mine"
    extra = json.loads(params["metadata"]["extra_body"])
    assert extra == {"top_k": 5, "stop": ["x"], "chat_template_kwargs": {"a": 1}}


class Call(NamedTuple):
    """A call of the policy, for tests: what it read after its parent, and what it sampled."""

    parent: int | None
    read: list[int]
    sampled: list[int]


def whole(calls: list[Call], number: int) -> list[int]:
    """All ids that a call read and sampled."""
    call = calls[number]
    before = [] if call.parent is None else whole(calls, call.parent)
    return [*before, *call.read, *call.sampled]


def answer_of(calls: list[Call], **changes: Any) -> dict[str, Any]:
    """An answer of `/run` with these calls, as Gym's model servers write their ids."""
    items: list[dict[str, Any]] = []
    for number, call in enumerate(calls):
        if number:
            items.append({"type": "message", "role": "user", "content": f"go on {number}"})
        ids = whole(calls, number)
        items.append({"type": "reasoning", "id": f"r{number}", "summary": []})
        items.append(
            {
                "type": "message",
                "role": "assistant",
                "id": f"m{number}",
                "content": [{"type": "output_text", "text": f"said {number}"}],
                "prompt_token_ids": ids[: len(ids) - len(call.sampled)],
                "generation_token_ids": call.sampled,
                "generation_log_probs": [-0.5] * len(call.sampled),
            }
        )
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "hi"}], "temperature": None},
        "response": {"id": "resp", "output": items, "usage": {"total_tokens": 3}},
        "reward": 0.1,
        "expected": 4,
        "_ng_task_index": 3,
        "extracted": "4",
        **changes,
    }


def record_of(result: dict[str, Any], made: Sample | None = None) -> TrajectoryRecord:
    made = made or sample()
    outcome = StepOutcome(
        role="environment",
        content="",
        metadata=GymAnswer(agent="agent", result=json.loads(json.dumps(result))).encode(),
        stop_strings=None,
        reward=0.1,
        terminated=True,
    )
    settings = fakes.settings()
    trajectory = gym_trajectory(
        made,
        settings,
        outcome,
        row=gym_request(made, settings)["row"],
        began=100.0,
        ended=103.5,
        decode=lambda ids: "".join(map(chr, ids)),
    )
    trajectory.check_tokens()
    return trajectory.record()


LINEAR = [Call(None, [65, 66], [67]), Call(0, [68], [69, 70]), Call(1, [71], [72])]


def test_calls_are_turns() -> None:
    record = record_of(answer_of(LINEAR))
    ids = [token for message in record.messages for token in message.token_ids]
    assert ids == whole(LINEAR, 2)
    assert [(message.role, message.turn) for message in record.messages] == [
        ("user", 0), ("assistant", 1), ("user", 1), ("assistant", 2), ("user", 2), ("assistant", 3), ("environment", 3),
    ]  # fmt: skip
    assert [message.content for message in record.messages] == ["hi", "C", "go on 1", "EF", "go on 2", "H", ""]
    responses = [message for message in record.messages if message.role == "assistant"]
    assert [list(message.logprobs or ()) for message in responses] == [[-0.5], [-0.5] * 2, [-0.5]]
    assert not any(message.policy_versions for message in responses)
    assert (record.stop_reason, record.token_source, record.branches) == ("terminated", "engine", None)
    assert record.continuity == {"new": 1, "clean": 2}
    assert record.rewards == [0.0, 0.0, 0.1]
    assert sum(record.timing.environment_seconds) == pytest.approx(3.5)
    assert record.timing.generation_seconds == [0.0] * 3
    assert record.metadata is not None
    assert record.metadata["expected"] == 4
    state = record.metadata["nemo_gym"]
    assert state["echoed"] == ["expected", "_ng_task_index"]
    assert {"extracted", "reward"} <= state["verification"].keys()
    assert "prompt_token_ids" not in json.dumps(state)


def test_what_is_exported_is_what_was_answered() -> None:
    result = answer_of(LINEAR)
    row = json.loads(json.dumps(rollout_of_record(record_of(result)), default=list))
    assert {name: row[name] for name in result} == result
    assert (row["_ng_rollout_index"], row["agent_ref"]["name"]) == (1, "agent")


@given(st.data())
def test_every_call_is_learned_from_once_with_all_that_it_read(data: st.DataObject) -> None:
    ids = st.lists(st.integers(0, 6), min_size=1, max_size=3)
    calls: list[Call] = []
    for number in range(data.draw(st.integers(1, 6))):
        parent = data.draw(st.none() | st.integers(0, number - 1)) if number else None
        calls.append(Call(parent, data.draw(ids), data.draw(ids)))
    result = answer_of(calls)
    record = record_of(result)
    assert record.continuity is not None
    assert sum(record.continuity.values()) == len(calls)
    branches = record.branches or []
    turns = [
        *(message for message in record.messages if message.role == "assistant" and message.turn),
        *(branch.messages[number] for branch in branches for number in branch.learn),
    ]
    # As many as there were, and each with what it read: the answer comes back from them.
    assert len(turns) == len(calls)
    assert record.metadata is not None
    state = record.metadata["nemo_gym"]
    again = json.loads(json.dumps(with_tokens(record, state["response"], state["calls"]), default=list))
    assert again == result["response"]


def test_a_prompt_that_does_not_begin_with_what_was_sampled_is_a_branch() -> None:
    calls = [Call(None, [65], [66]), Call(None, [65, 67], [68])]
    record = record_of(answer_of(calls))
    assert (record.turn_count, record.continuity) == (1, {"new": 1, "forked": 1})
    assert record.branches is not None
    (branch,) = record.branches
    # The messages between the calls are not all that the second read.
    assert [message.content for message in branch.messages] == ["AC", "D"]
    assert branch.learn == [1]


def test_what_a_model_said_without_ids_is_not_the_policy_s() -> None:
    result = answer_of(LINEAR[:2])
    said = {"type": "message", "role": "assistant", "content": "another model"}
    items = result["response"]["output"]
    result["response"]["output"] = [*items[:2], said, *items[2:], {"type": "message", "role": "user", "content": "x"}]
    result["response"]["output"].append(said)
    record = record_of(result)
    assert record.turn_count == 2
    assert [(message.role, message.content) for message in record.messages] == [
        ("user", "hi"), ("assistant", "C"), ("assistant", "another model"), ("user", "go on 1"), ("assistant", "EF"),
        ("user", "x"), ("assistant", "another model"),
    ]  # fmt: skip
    assert [number for number, message in enumerate(record.messages) if message.sampled] == [1, 4]


def test_calls_of_tools_and_their_answers_are_messages() -> None:
    result = answer_of(LINEAR[:2])
    items = result["response"]["output"]
    tokens = {name: items[1].pop(name) for name in list(items[1]) if name.startswith(("prompt_", "generation_"))}
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "dark"}]}
    result["response"]["output"] = [items[0], items[1], call, {**call, "call_id": "d", **tokens}, output, *items[3:]]
    record = record_of(result)
    _, first, answered, *_ = record.messages
    assert [made["id"] for made in first.fields["tool_calls"]] == ["c", "d"]  # type: ignore[attr-defined]
    assert first.fields["text"] == "said 0"  # type: ignore[attr-defined]
    assert (answered.role, answered.content) == ("tool", "dark")
    assert answered.fields == {"tool_call_id": "c"}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "terminated"),
        ({"truncated": True}, "max_turns"),
        ({"truncated": False}, "terminated"),
        ({"cut": True}, "truncated"),
    ],
)
def test_why_a_rollout_ended(changes: dict[str, Any], reason: str) -> None:
    cut = changes.pop("cut", False)
    result = answer_of(LINEAR, **changes)
    result["response"]["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
    record = record_of(result)
    assert record.stop_reason == reason
    assert record.messages[-2].truncated is cut


def test_components_of_the_reward_are_its_parts() -> None:
    record = record_of(answer_of(LINEAR[:2], reward_components={"format": 0.25, "right": -0.15}))
    assert record.reward_parts == {"format": [0.0, 0.25], "right": [0.0, -0.15]}


def without(result: dict[str, Any], name: str) -> dict[str, Any]:
    for item in result["response"]["output"]:
        item.pop(name, None)
    return result


def with_field(name: str, value: Any) -> dict[str, Any]:
    result = answer_of(LINEAR)
    result["response"]["output"][1][name] = value
    return result


@pytest.mark.parametrize(
    ("result", "cause"),
    [
        (without(answer_of(LINEAR), "generation_token_ids"), "set return_token_id_information: true"),
        (answer_of(LINEAR, response={}), r"response\.output must be a list"),
        (answer_of([]), "set return_token_id_information: true"),
        (with_field("prompt_token_ids", None), r"response\.output\[1\]\.prompt_token_ids must be token ids"),
        (with_field("generation_token_ids", [1.5]), r"response\.output\[1\]\.generation_token_ids must be token ids"),
        (with_field("generation_token_ids", [-1]), r"generation_token_ids: found -1"),
        (with_field("generation_log_probs", []), r"generation_log_probs: found 0 for 1 token ids"),
        (with_field("generation_log_probs", ["x"]), r"response\.output\[1\]\.generation_log_probs: "),
        (with_field("generation_log_probs", [math.nan]), "one is not a finite number"),
        (answer_of(LINEAR, reward=None), r"reward must be a finite number"),
        (answer_of(LINEAR, reward=10**400), r"reward must be a finite number; found int "),
        (answer_of(LINEAR, reward_components={"a": 10**400}), r"reward_components must be numbers by name"),
        (answer_of(LINEAR, reward_components={"a": 3.0}), r"is 0\.1 but its reward_components sum to 3\.0"),
    ],
)
def test_an_answer_that_cannot_be_learned_from_names_the_field(result: dict[str, Any], cause: str) -> None:
    with pytest.raises(StepInvalid, match=cause):
        record_of(result)


def test_a_prompt_that_does_not_fit_is_the_row_s_fault() -> None:
    result = answer_of([])
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": ""}]}
    result["response"] |= {"output": [said], "incomplete_details": {"reason": "max_output_tokens"}}
    with pytest.raises(RowFault, match="the row's prompt does not fit its window"):
        record_of(result)


def test_sampled_ids_may_be_texts() -> None:
    record = record_of(with_field("generation_token_ids", ["67"]))
    assert list(record.messages[1].token_ids) == [67]
