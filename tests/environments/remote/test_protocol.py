"""The messages of the protocol: what is written is read as the same."""

from __future__ import annotations

from typing import Any

import pytest

from kuberoll_workers.environments.batches import CloseBatch, GroupBatch, ResetBatch, StepBatch, StepItem
from kuberoll_workers.environments.interface import Episode, EpisodeEnd, EpisodeStart, GroupMember
from kuberoll_workers.environments.outcome import Outcomes, RowFault, StepOutcome, StepTimedOut
from kuberoll_workers.environments.remote import protocol

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
    assert protocol.batch_of(protocol.body_of(batch), batch.method) == batch


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
    read = protocol.decode_results(protocol.answer_of(batch, outcomes), batch)
    assert read[0] == outcomes[0]
    assert [(type(fault), str(fault)) for fault in read[1:]] == [(RowFault, "a bad row"), (StepTimedOut, "late")]


def test_starts_are_read_as_they_were() -> None:
    messages = [{"role": "user", "content": "go"}]
    starts = [EpisodeStart(messages=messages, metadata={"a": 1}, stop_strings=("!",), tools=TOOLS), EpisodeStart()]
    batch = ResetBatch([EPISODE, EPISODE])
    read = protocol.decode_results(protocol.answer_of(batch, starts), batch)
    assert read[0] == starts[0]
    assert (list(read[1].messages), read[1].tools) == ([], None)
