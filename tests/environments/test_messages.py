"""Messages to environments that run elsewhere: what is written is read as the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.environments import messages
from kuberoll_workers.environments.batches import CloseBatch, GroupBatch, ResetBatch, StepBatch, StepItem
from kuberoll_workers.environments.interface import Episode, EpisodeEnd, EpisodeStart, GroupMember
from kuberoll_workers.environments.outcome import Outcomes, RowFault, StepInvalid, StepOutcome, StepTimedOut

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
    assert messages.read_call(messages.call_of(method, request)) == (method, request)


@given(st.binary())
def test_an_answer_over_a_channel_is_an_answer_a_fault_or_refused(data: bytes) -> None:
    assert messages.read_answer(messages.answered(data)) == data
    with pytest.raises(StepTimedOut, match="late"):
        messages.read_answer(messages.failed(StepTimedOut("late")))
    if not data.startswith((b"+", b"-")):
        with pytest.raises(messages.InvalidMessage):
            messages.read_answer(data)


@given(st.binary())
def test_anything_else_in_place_of_a_fault_is_refused(data: bytes) -> None:
    with pytest.raises(messages.InvalidMessage):
        messages.read_answer(b"-" + data)


NO_OBJECTS = [b"[1]", b"1", b'"a"', b"[" * 300 + b"]" * 300, b"1e999"]


@pytest.mark.parametrize("state", NO_OBJECTS)
def test_metadata_that_is_no_object_is_a_fault_of_its_trajectory(state: bytes) -> None:
    answer = b'{"outcomes":[{"metadata":%s},{}]}' % state
    bad, good = messages.decode_results(answer, StepBatch([StepItem([], None)] * 2))
    assert isinstance(bad, StepInvalid)
    assert good == StepOutcome("environment", "", None, None, 0.0, False, {}, None, ())
    with pytest.raises(messages.RequestRefused):
        messages.batch_of(b'{"steps":[{"log":[],"metadata":%s}]}' % state, "step")
