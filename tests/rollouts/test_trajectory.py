"""One trajectory, turn by turn: what is stored of it at each point, and how it goes on from that."""

from __future__ import annotations

import copy
from array import array
from typing import Any

import pytest

from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.prompts import Sample
from kuberoll_workers.data.record import (
    DroppedRecord,
    FailureRecord,
    Partial,
    Timing,
    TokenCounts,
    TrajectoryRecord,
    TurnRecord,
    decode_line,
    encode_line,
)
from kuberoll_workers.environments.outcome import StepInvalid, StepOutcome
from kuberoll_workers.policy.interface import GenerationResult
from kuberoll_workers.rollouts.failures import TrajectoryFailed
from kuberoll_workers.rollouts.trajectory import PrefixBroken, Trajectory
from tests.rollouts.fakes import sample, settings

PROMPT = token_array(map(ord, "ab"))


def result(text: str, *, exact: bool = True, finish_reason: Any = "stop", logprobs: bool = True) -> GenerationResult:
    return GenerationResult(
        token_ids=token_array(map(ord, text)),
        logprobs=array("f", [-0.5] * len(text) if logprobs else []),
        finish_reason=finish_reason,
        policy_versions=(("v1", 0, len(text)),),
        exact=exact,
    )


def outcome(reward: float, **changes: Any) -> StepOutcome:
    fields: dict[str, Any] = {
        "role": "environment", "content": "obs", "metadata": {"left": 1}, "stop_strings": ("!",), "reward": reward,
        "terminated": False, "reward_parts": {}, "answer": None,
    }  # fmt: skip
    return StepOutcome(**{**fields, **changes})


def sample_of(partial: Partial | None = None) -> Sample:
    return sample(3, 2, prompt="ab", metadata={"left": 2}, seed=7, partial=partial)


def after_two_turns(partial: Partial | None = None, **changes: Any) -> Trajectory:
    """Two turns; the second names a reward, is encoded anew and has an answer."""
    trajectory = Trajectory(sample_of(partial), settings(max_sequence_length=20, **changes))
    trajectory.add_response(result("xyz"), "xyz", 0.5)
    trajectory.add_step(outcome(0.25), token_array([7, 8]), 0.125)
    trajectory.add_response(result("w", exact=False), "w", 1.5)
    second = outcome(0.5, metadata=None, stop_strings=None, reward_parts={"right": 0.5}, answer="4")
    trajectory.add_step(second, token_array([9]), 0.25, ended_at=1_790_000_000.5)
    return trajectory


MESSAGES = [
    Message("user", "ab", PROMPT),
    Message("assistant", "xyz", token_array(map(ord, "xyz")), array("f", [-0.5] * 3), 1, (("v1", 0, 3),), sampled=True),
    Message("environment", "obs", token_array([7, 8]), None, 1),
    Message("assistant", "w", token_array(map(ord, "w")), array("f", [-0.5]), 2, (("v1", 0, 1),), sampled=True),
    Message("environment", "obs", token_array([9]), None, 2),
]
FIRST = TurnRecord(
    task_index=3, rollout_index=2, attempt=0, turn=1, messages=MESSAGES[1:3], reward=0.25, reward_parts={},
    metadata={"left": 1}, stop_strings=["!"], answer=None, generation_seconds=0.5, environment_seconds=0.125,
    stop_reason=None, token_source="engine", prompt=Trajectory(sample_of(), settings()).beginning(),
)  # fmt: skip


def test_a_request_continues_the_trajectory() -> None:
    trajectory = Trajectory(sample_of(), settings(max_sequence_length=20))
    first = trajectory.next_request(0)
    assert (first.request_id, first.session_id, list(first.token_ids)) == ("3-2-0-1-0", "3-2-0", [97, 98])
    # As many tokens as the window has room for, or as the sampling allows.
    assert (first.sampling.max_tokens, first.sampling.stop) == (18, ())
    trajectory.add_response(result("xyz"), "xyz", 0.5)
    trajectory.add_step(outcome(0.25), token_array([7, 8]), 0.125)
    second, again = trajectory.next_request(0), trajectory.next_request(1)
    assert list(second.token_ids) == [97, 98, 120, 121, 122, 7, 8]
    assert (second.request_id, again.request_id) == ("3-2-0-2-0", "3-2-0-2-1")
    assert (second.sampling.max_tokens, second.sampling.stop) == (13, ("!",))
    assert first.sampling.seed != second.sampling.seed == again.sampling.seed
    assert trajectory.chat == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "xyz"},
        {"role": "environment", "content": "obs"},
    ]


def test_the_newest_turn_has_what_going_on_needs() -> None:
    trajectory = Trajectory(sample_of(), settings(max_sequence_length=20))
    assert trajectory.partial() is None
    trajectory.add_response(result("xyz"), "xyz", 0.5)
    trajectory.add_step(outcome(0.25), token_array([7, 8]), 0.125)
    assert trajectory.turn_record() == FIRST
    two = after_two_turns()
    second = TurnRecord(
        task_index=3, rollout_index=2, attempt=0, turn=2, messages=MESSAGES[3:], reward=0.5,
        reward_parts={"right": 0.5}, metadata={"left": 1}, stop_strings=None, answer="4", generation_seconds=1.5,
        environment_seconds=0.25, stop_reason=None, ended_at=1_790_000_000.5, token_source="reencoded",
    )  # fmt: skip
    assert two.turn_record() == second
    partial = two.partial()
    assert partial is not None
    # Of turns before the newest the state and the stop strings are no more.
    earlier = copy.deepcopy(FIRST)
    earlier.metadata = earlier.stop_strings = None
    earlier.reward_parts = {"right": 0.0}
    assert partial.turns == [earlier, second]


def test_a_trajectory_goes_on_from_its_turns_as_if_nothing_had_happened() -> None:
    alone = after_two_turns(max_turns=2)
    partial = after_two_turns(max_turns=2).partial()
    assert alone.stop_reason == "max_turns"
    resumed = Trajectory(sample_of(partial), settings(max_sequence_length=20, max_turns=2))
    assert resumed.stop_reason == "max_turns"
    assert resumed.record() == alone.record()
    assert list(resumed.context) == list(alone.context)
    # An end that was stored stays, even where there is room for more turns now.
    assert Trajectory(sample_of(partial), settings(max_sequence_length=20, max_turns=8)).stop_reason == "max_turns"
    unended = Trajectory(sample_of(after_two_turns().partial()), settings(max_sequence_length=20))
    assert (unended.stop_reason, unended.stop_strings, unended.metadata, unended.answer) == (
        None,
        None,
        {"left": 1},
        "4",
    )
    assert list(unended.next_request(0).token_ids) == list(after_two_turns().next_request(0).token_ids)


def test_what_is_stored_of_one_that_finished() -> None:
    trajectory = after_two_turns(max_turns=2)
    assert trajectory.record() == TrajectoryRecord(
        task_index=3, rollout_index=2, task_name="env", idx="row-3", messages=MESSAGES, total_reward=0.75,
        rewards=[0.25, 0.5], reward_parts={"right": [0.0, 0.5]}, answer="4", stop_reason="max_turns", turn_count=2,
        tokens=TokenCounts(2, 4, 3), metadata={"left": 1}, seed=7,
        timing=Timing([0.5, 1.5], [0.125, 0.25], [None, 1_790_000_000.5]), attempt=0, token_source="reencoded",
    )  # fmt: skip
    going = after_two_turns()
    with pytest.raises(RuntimeError, match="has not ended"):
        going.record()


def test_what_is_stored_of_one_that_failed_or_is_not_wanted() -> None:
    trajectory = after_two_turns()
    # In its third turn.
    trajectory.add_response(result("v"), "v", 0.5)
    third = Message("assistant", "v", token_array(map(ord, "v")), array("f", [-0.5]), 3, (("v1", 0, 1),), sampled=True)
    failure = TrajectoryFailed("it broke", reason="EnvironmentRaised", stage="environment", tries=2)
    assert trajectory.failure_record(failure) == FailureRecord(
        task_index=3, rollout_index=2, task_name="env", idx="row-3", kind="environment", stage="environment",
        cause="it broke", tries=2, attempt=0, turn_count=3, seed=7, messages=[*MESSAGES, third],
        metadata={"left": 1}, reason="EnvironmentRaised", tokens=5,
    )  # fmt: skip
    assert trajectory.dropped_record("oversampled") == DroppedRecord(
        task_index=3, rollout_index=2, task_name="env", idx="row-3", reason="oversampled", stop_reason=None,
        turn_count=2, total_reward=0.75, rewards=[0.25, 0.5], tokens=TokenCounts(2, 4, 3), messages=MESSAGES,
        metadata={"left": 1}, seed=7, attempt=0,
    )  # fmt: skip


def test_log_probabilities_are_stored_where_there_is_one_for_each_token() -> None:
    trajectory = Trajectory(sample_of(), settings(max_sequence_length=20))
    trajectory.add_response(result("xyz", logprobs=False, finish_reason="length"), "xyz", 0.5)
    assert (trajectory.messages[-1].logprobs, trajectory.messages[-1].truncated) == (None, True)
    trajectory.add_step(outcome(0.0), token_array([7]), 0.0)
    assert trajectory.stop_reason == "truncated"


def test_a_cut_observation_stays_one_after_a_resume() -> None:
    trajectory = Trajectory(sample_of(), settings(max_sequence_length=8))
    trajectory.add_response(result("xyz"), "xyz", 0.5)
    trajectory.add_step(outcome(0.0, terminated=True), token_array([7] * 9), 0.0)
    assert (trajectory.messages[-1].truncated, len(trajectory.context)) == (True, 8)
    # One that waited for its group, so that its last turn was journaled, too.
    turns = [decode_line(encode_line(trajectory.turn_record()), TurnRecord, where="t")]
    resumed = Trajectory(sample_of(Partial(turns)), settings(max_sequence_length=8))
    assert encode_line(resumed.record()) == encode_line(trajectory.record())


def test_an_observation_is_cut_to_the_window() -> None:
    trajectory = Trajectory(sample_of(), settings(max_sequence_length=8))
    trajectory.add_response(result("xyz"), "xyz", 0.5)
    trajectory.add_step(outcome(0.0), token_array([1, 2, 3, 4, 5]), 0.0)
    message = trajectory.messages[-1]
    assert (list(message.token_ids), message.truncated, trajectory.stop_reason) == ([1, 2, 3], True, "truncated")
    assert trajectory.record().tokens == TokenCounts(2, 3, 3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.context.append(1), "the context of turn 3 has 10 tokens where its messages have 9"),
        (lambda t: t.context.pop(), "the context of turn 3 has 8 tokens where its messages have 9"),
    ],
)
def test_a_context_of_another_length_is_found_before_the_next_turn(change: Any, words: str) -> None:
    trajectory = after_two_turns()
    trajectory.check_prefix()
    change(trajectory)
    with pytest.raises(PrefixBroken, match=words):
        trajectory.check_prefix()


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (0, "the context does not begin with the prompt"),
        (1, "the context does not begin with the prompt"),
        (2, "does not hold the tokens of message 0 after the prompt"),
        (5, "does not hold the tokens of message 1 after the prompt"),
        (8, "does not hold the tokens of message 3 after the prompt"),
    ],
)
def test_changed_tokens_are_found_at_the_end(place: int, words: str) -> None:
    trajectory = after_two_turns()
    trajectory.check_tokens()
    trajectory.context[place] += 1
    with pytest.raises(PrefixBroken, match=words):
        trajectory.check_tokens()


def test_rewards_whose_sum_no_float32_holds_are_the_environment_s_mistake() -> None:
    trajectory = Trajectory(sample_of(), settings(max_sequence_length=20))
    trajectory.add_response(result("x"), "x", 0.5)
    trajectory.check_step(outcome(3e38))
    trajectory.add_step(outcome(3e38), token_array([7]), 0.0)
    trajectory.add_response(result("x"), "x", 0.5)
    trajectory.check_step(outcome(-3e38))
    with pytest.raises(StepInvalid, match="the sum of the rewards of 2 turns"):
        trajectory.check_step(outcome(3e38))


def test_whether_the_policy_will_answer() -> None:
    trajectory = Trajectory(sample_of(), settings(max_sequence_length=20, max_turns=2))
    trajectory.add_response(result("x"), "x", 0.5)
    assert trajectory.continues_after(outcome(0.0))
    assert not trajectory.continues_after(outcome(0.0, terminated=True))
    trajectory.add_step(outcome(0.0), token_array([7]), 0.0)
    trajectory.add_response(result("x", finish_reason="length"), "x", 0.5)
    assert not trajectory.continues_after(outcome(0.0))
