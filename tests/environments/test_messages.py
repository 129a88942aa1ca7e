"""Messages to environments that run elsewhere: what is written is read as the same."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.environments import messages
from kuberoll_workers.environments.batches import CloseBatch, GroupBatch, ResetBatch, StepBatch, StepItem
from kuberoll_workers.environments.interface import Episode, EpisodeEnd, EpisodeStart, GroupMember
from kuberoll_workers.environments.outcome import (
    EnvironmentFault,
    Outcomes,
    RowFault,
    StepInvalid,
    StepOutcome,
    StepRaised,
    StepTimedOut,
)

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALLS = [{"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
EPISODE = Episode(id="a", messages=[{"role": "user", "content": "p"}], metadata={"n": 1.5}, seed=1, max_turns=2)


@pytest.mark.parametrize(
    "batch",
    [
        StepBatch([StepItem([{"role": "assistant", "content": "", "tool_calls": CALLS}], {"a": [1, None]}, "a")]),
        StepBatch([StepItem([], None)]),
        ResetBatch([EPISODE, Episode(id="b", messages=[], metadata=None, seed=2, max_turns=3, tools=TOOLS)]),
        GroupBatch(
            [
                GroupMember(
                    id="a",
                    messages=[{"role": "assistant", "content": "", "tool_calls": CALLS}],
                    metadata=None,
                    reward=1.0,
                    stop_reason="terminated",
                    answer=None,
                    group_reward=None,
                )
            ]
        ),
        CloseBatch([EpisodeEnd(id="a", metadata=None, reason="lost")]),
    ],
)
def test_a_request_is_read_as_it_was(batch: Any) -> None:
    assert messages.batch_of(messages.request_of(batch), batch.method) == batch


def test_outcomes_are_read_as_they_were() -> None:
    several = ({"role": "tool", "content": "a", "tool_call_id": "1"}, {"role": "user", "content": "b"})
    outcomes = Outcomes(
        [
            StepOutcome("user", "b", {"a": 1}, ("s",), 1.0, True, {"x": 1.0}, "answer", several),
            RowFault("a bad row"),
            StepTimedOut("late"),
        ],
        answered=True,
    )
    batch = StepBatch([StepItem([], None)] * 3)
    read = messages.decode_results(messages.answer_of(batch, outcomes), batch)
    assert read[0] == outcomes[0]
    assert [(type(fault), str(fault)) for fault in read[1:]] == [(RowFault, "a bad row"), (StepTimedOut, "late")]


def test_starts_are_read_as_they_were() -> None:
    first = [{"role": "user", "content": "go"}]
    starts = [EpisodeStart(messages=first, metadata={"a": 1}, stop_strings=("!",), tools=TOOLS), EpisodeStart()]
    batch = ResetBatch([EPISODE, EPISODE])
    read = messages.decode_results(messages.answer_of(batch, starts), batch)
    assert read[0] == starts[0]
    assert (list(read[1].messages), read[1].tools) == ([], None)


@given(st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1), st.binary())
def test_a_call_over_a_channel_names_its_method(method: str, request: bytes) -> None:
    assert messages.unwrap_call(messages.wrap_call(method, request)) == (method, request)


@given(st.binary())
def test_an_answer_over_a_channel_is_an_answer_a_fault_or_refused(data: bytes) -> None:
    assert messages.unwrap_answer(messages.wrap_answer(data)) == data
    with pytest.raises(RowFault, match="bad"):
        messages.unwrap_answer(messages.wrap_fault(RowFault("bad")))
    if not data.startswith((b"+", b"-")):
        with pytest.raises(messages.InvalidMessage):
            messages.unwrap_answer(data)


@given(st.binary())
def test_anything_else_in_place_of_a_fault_is_refused(data: bytes) -> None:
    with pytest.raises(messages.InvalidMessage):
        messages.unwrap_answer(b"-" + data)


NO_OBJECTS = [b"[1]", b"1", b'"a"', b"[" * 300 + b"]" * 300, b"1e999"]


@pytest.mark.parametrize("state", NO_OBJECTS)
def test_metadata_that_is_no_object_is_a_fault_of_its_trajectory(state: bytes) -> None:
    answer = b'{"outcomes":[{"metadata":%s},{}]}' % state
    bad, good = messages.decode_results(answer, StepBatch([StepItem([], None)] * 2))
    assert isinstance(bad, StepInvalid)
    assert good == StepOutcome("environment", "", None, None, 0.0, False, {}, None, ())
    with pytest.raises(messages.RequestRefused):
        messages.batch_of(b'{"steps":[{"log":[],"metadata":%s}]}' % state, "step")


def test_a_process_never_says_of_itself_that_it_is_late() -> None:
    with pytest.raises(StepRaised, match="late"):
        messages.unwrap_answer(messages.wrap_fault(StepTimedOut("late")))
    late = messages.encode(messages.fault_message(StepTimedOut("late")))
    with pytest.raises(messages.InvalidMessage, match="late"):
        messages.unwrap_answer(b"-" + late)
    batch = StepBatch([StepItem([], None)])
    answer = messages.answer_of(batch, Outcomes([StepTimedOut("late")], answered=False))
    with pytest.raises(messages.InvalidMessage, match="late"):
        messages.unwrap_results(messages.wrap_answer(answer), batch)
    # A server says it of the process that it waited for.
    assert isinstance(messages.decode_results(answer, batch)[0], StepTimedOut)


@pytest.mark.parametrize("answer", [b"", b"{}x", b'{"outcomes":[]}', b"null"])
def test_an_answer_to_another_request_ends_no_episode(answer: bytes) -> None:
    end = CloseBatch([EpisodeEnd(id="a", metadata=None, reason="lost")])
    with pytest.raises(messages.InvalidMessage, match="one to another request"):
        messages.unwrap_results(messages.wrap_answer(answer), end)
    assert messages.unwrap_results(messages.wrap_answer(messages.EMPTY), end) == [None]


# What any program may write: bytes, JSON of any form, and answers with one value replaced.
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)
FIELDS = (
    "role",
    "content",
    "metadata",
    "stop_strings",
    "reward",
    "reward_parts",
    "terminated",
    "answer",
    "messages",
    "fault",
)
ANSWERS = (
    st.binary()
    | VALUES.map(lambda value: json.dumps(value).encode())
    | st.builds(
        lambda name, value: json.dumps({"outcomes": [{name: value}], "starts": [{name: value}]}).encode(),
        st.sampled_from(FIELDS),
        VALUES,
    )
    | VALUES.map(lambda value: json.dumps({"rows": [value], "metrics": value}).encode())
    | st.integers(1, 2000).map(lambda depth: b'{"metrics":{"a":' + b"[" * depth + b"]" * depth + b"}}")
)


@given(ANSWERS, st.sampled_from([b"+", b"-", b""]))
def test_whatever_a_process_writes_is_an_answer_a_fault_or_a_violation(data: bytes, mark: bytes) -> None:
    step, reset = StepBatch([StepItem([], None)]), ResetBatch([EPISODE])
    for batch in (step, reset):
        try:
            [result] = messages.unwrap_results(mark + data, batch)
        except (messages.InvalidMessage, EnvironmentFault):
            continue
        assert isinstance(result, StepOutcome | EpisodeStart | EnvironmentFault)
    for read in (messages.decode_rows, messages.decode_metrics):
        with contextlib.suppress(messages.InvalidMessage):
            read(data)
