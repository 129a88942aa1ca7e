"""The mark of what is not token-exact: from a turn's result to the stored line, and over an interruption."""

from __future__ import annotations

from array import array

import pytest

from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.prompts import Prompt, Sample
from kuberoll_workers.data.record import TrajectoryRecord, TurnRecord, decode_line, encode_line
from kuberoll_workers.environments.outcome import StepOutcome
from kuberoll_workers.policy.interface import GenerationResult, SamplingParameters
from kuberoll_workers.rollouts.settings import RolloutSettings
from kuberoll_workers.rollouts.trajectory import Trajectory

SETTINGS = RolloutSettings(
    max_turns=2, max_sequence_length=64, concurrency=1, sampling=SamplingParameters(max_tokens=8)
)


def sample(**changes: object) -> Sample:
    ids = token_array([1, 2])
    prompt = Prompt(
        task_index=0,
        task_name="t",
        idx=0,
        messages=(Message("user", "x", ids),),
        token_ids=ids,
        metadata={},
        stop_strings=None,
        sampling={},
    )
    values: dict[str, object] = {"prompt": prompt, "rollout_index": 0, "seed": None, **changes}
    return Sample(**values)  # type: ignore[arg-type]


def turn(trajectory: Trajectory, *, exact: bool) -> None:
    ids = token_array([3, 4])
    logprobs = array("f", [-0.5, -0.5] if exact else [])
    result = GenerationResult(token_ids=ids, logprobs=logprobs, finish_reason="stop", exact=exact)
    trajectory.add_response(result, "up", 0.0)
    outcome = StepOutcome(
        role="environment", content="y", metadata=None, stop_strings=None, reward=1.0, terminated=False
    )
    trajectory.add_step(outcome, token_array([5]), 0.0)


@pytest.mark.parametrize("turns", [(True, True), (True, False), (False, True)])
def test_a_trajectory_is_marked_by_any_of_its_turns(turns: tuple[bool, bool]) -> None:
    trajectory = Trajectory(sample(), SETTINGS)
    turn(trajectory, exact=turns[0])
    partial = trajectory.partial()
    assert partial is not None
    # As journaled, and read again by a later process.
    stored = [decode_line(encode_line(made), TurnRecord, where="t") for made in partial.turns]
    partial.turns[:] = stored
    resumed = Trajectory(sample(partial=partial), SETTINGS)
    for each in (trajectory, resumed):
        turn(each, exact=turns[1])
        each.check_tokens()
        record = each.record()
        assert record.token_source == ("engine" if all(turns) else "reencoded")
        assert [message.logprobs is None for message in record.messages if message.role == "assistant"] == [
            not exact for exact in turns
        ]
        line = encode_line(record)
        assert (b"token_source" in line) is not all(turns)
        assert decode_line(line, TrajectoryRecord, where="t").token_source == record.token_source
