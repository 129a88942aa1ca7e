"""Batches: what stands where, for which row."""

from __future__ import annotations

import dataclasses
from array import array
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kuberoll.trainer import Batch, Group, GroupKey, InexactTrajectory, RowTooLong, dr_grpo, grpo, rloo
from kuberoll.trainer.batch import make_batch, require_exact
from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.record import Branch, Timing, TrajectoryRecord
from tests.analysis.test_paths import asked_in, played
from tests.serving.test_session_tree import calls
from tests.trainer.support import trajectory


def group(*records: TrajectoryRecord) -> Group:
    return Group(
        key=GroupKey(records[0].task_index, 0), task_name="env", wanted=len(records), trajectories=tuple(records)
    )


def batch_of(*groups: Group, pad_id: int = 0) -> Batch:
    return make_batch(groups, advantages=grpo, pad_id=pad_id)


def test_a_row_has_tokens_up_to_the_last_response_each_with_what_is_known_of_it() -> None:
    short = trajectory(4, 1, reward=0.0)
    short.messages = short.messages[:2]
    batch = batch_of(group(trajectory(4, 0), short), pad_id=99)
    assert batch.input_ids.tolist() == [[1, 4, 2, 0, 5, 6], [1, 4, 2, 1, 99, 99]]
    assert batch.attention_mask.tolist() == [[1] * 6, [1] * 4 + [0] * 2]
    assert batch.loss_mask.tolist() == [
        [False, False, True, True, False, True],
        [False, False, True, True, False, False],
    ]
    assert batch.logprobs.tolist() == [[0, 0, -0.5, -0.25, 0, -1], [0, 0, -0.5, -0.25, 0, 0]]
    assert batch.policy_version.tolist() == [[-1, -1, 3, 3, -1, 4], [-1, -1, 3, 3, -1, -1]]
    assert (batch.task_index.tolist(), batch.rollout_index.tolist()) == ([4, 4], [0, 1])
    assert (batch.path.tolist(), batch.group.tolist(), batch.lengths.tolist()) == ([0, 0], [0, 0], [6, 4])
    assert batch.reward.tolist() == [1, 0]
    assert batch.advantages is not None
    np.testing.assert_allclose(batch.advantages, [0.5**0.5, -(0.5**0.5)], rtol=1e-5)


def test_advantages_of_a_short_group_are_as_large_as_those_of_a_whole_one() -> None:
    whole = group(trajectory(4, 0), trajectory(4, 1, reward=0.0))
    short = dataclasses.replace(whole, wanted=4)
    for function, factor in ((grpo, 1.5), (dr_grpo, 1.5), (rloo, 1.0)):
        found = [make_batch([given], advantages=function, pad_id=0).advantages for given in (whole, short)]
        assert found[0] is not None
        assert found[1] is not None
        np.testing.assert_allclose(found[1], factor * found[0])


def test_versions_that_are_no_numbers_are_texts() -> None:
    record = trajectory(0)
    record.messages[3].policy_versions = [("step-7", 0, 1)]
    batch = batch_of(group(record))
    assert batch.policy_version.tolist() == [["", "", "3", "3", "", "step-7"]]
    record.messages[3].policy_versions = [("07", 0, 1)]
    assert batch_of(group(record)).policy_version.tolist()[0][-1] == "07"


def branching(task: int, rollout: int, reward: float) -> TrajectoryRecord:
    """An agent's trajectory with a further path, whose first response its own path has, too."""
    record = trajectory(task, rollout, reward)
    again = [*record.messages[:2], Message("user", "q", token_array([8]), turn=1)]
    further = Message("assistant", "c", token_array([9, 9]), array("f", [-2.0, -3.0]), 2, [("5", 0, 2)], sampled=True)
    record.branches = [Branch([*again, further], learn=[3], timing=Timing([0.1, 0.1], [0.0, 0.0], [None, None]))]
    return record


def test_each_path_is_a_row_with_the_advantage_of_its_trajectory() -> None:
    batch = batch_of(group(branching(0, 0, 1.0), trajectory(0, 1, reward=0.0)))
    assert (batch.path.tolist(), batch.rollout_index.tolist()) == ([0, 1, 0], [0, 0, 1])
    assert batch.input_ids[1].tolist() == [1, 0, 2, 0, 8, 9, 9]
    # The response that both paths have is learned in the first.
    assert batch.loss_mask[1].tolist() == [False] * 5 + [True] * 2
    assert batch.logprobs[1].tolist() == [0] * 5 + [-2, -3]
    assert batch.policy_version[1].tolist() == [-1] * 5 + [5] * 2
    assert batch.advantages is not None
    # Of two trajectories, and not of three rows.
    np.testing.assert_allclose(batch.advantages, [0.5**0.5, 0.5**0.5, -(0.5**0.5)], rtol=1e-5)


@given(calls)
def test_every_response_of_an_agent_is_learned_in_one_row_after_what_the_policy_saw(
    made: list[tuple[int, list[int], list[int]]],
) -> None:
    assume(any(response for _, _, response in made))
    asked = asked_in(made)
    wholes = [prompt + response for prompt, response in asked]
    batch = batch_of(group(played(asked)))
    rows = [ids[:length].tolist() for ids, length in zip(batch.input_ids, batch.lengths, strict=True)]
    assert all(row in wholes for row in rows)
    learned = Counter(batch.input_ids[batch.loss_mask].tolist())
    assert learned == Counter(token for _, response in asked for token in response)
    assert np.isfinite(batch.logprobs).all()


def test_a_trajectory_whose_prompt_left_no_room_is_a_row_without_anything_to_learn() -> None:
    record = trajectory(0)
    record.messages = record.messages[:1]
    batch = batch_of(group(record))
    assert batch.input_ids.tolist() == [[1, 0]]
    assert not batch.loss_mask.any()


@pytest.mark.slow
def test_tensors_are_the_arrays() -> None:
    torch = pytest.importorskip("torch")
    batch = batch_of(group(trajectory(0), trajectory(0, 1)))
    tensors = batch.torch()
    assert (tensors["input_ids"].dtype, tensors["loss_mask"].dtype) == (torch.int64, torch.bool)
    assert (tensors["logprobs"].dtype, tensors["advantages"].shape) == (torch.float32, (2,))
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor.numpy(), getattr(batch, name))
    record = trajectory(0)
    record.messages[3].policy_versions = [("step-7", 0, 1)]
    # Texts are no tensors.
    assert tensors.keys() - batch_of(group(record)).torch().keys() == {"policy_version"}


def of_lengths(lengths: Sequence[int]) -> Batch:
    records = []
    for rollout, length in enumerate(lengths):
        record = trajectory(0, rollout, reward=float(rollout))
        record.messages = [Message("user", "", token_array(range(1, length)))] if length else []
        record.messages += (
            [Message("assistant", "", token_array([0]), array("f", [-1.0]), 1, sampled=True)] if length else []
        )
        records.append(record)
    return batch_of(group(*records), pad_id=-5)


@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=20), extra=st.integers(0, 30))
def test_mini_batches_have_every_row_once_and_no_more_tokens_than_they_may(lengths: list[int], extra: int) -> None:
    batch = of_lengths(lengths)
    budget = max(1, *lengths) + extra
    parts = list(batch.minibatches(max_tokens=budget))
    seen: Counter[int] = Counter()
    for part in parts:
        assert part.input_ids.size <= budget
        assert part.input_ids.shape[1] == part.lengths.max()
        for row in range(len(part)):
            rollout = int(part.rollout_index[row])
            seen[rollout] += 1
            length = lengths[rollout]
            assert part.input_ids[row].tolist() == batch.input_ids[rollout, : part.input_ids.shape[1]].tolist()
            assert part.attention_mask[row].sum() == length == part.lengths[row]
            assert part.advantages is not None
            assert batch.advantages is not None
            assert part.advantages[row] == batch.advantages[rollout]
    assert seen == Counter(range(len(lengths)))
    again = list(batch.minibatches(max_tokens=budget))
    assert [part.rollout_index.tolist() for part in again] == [part.rollout_index.tolist() for part in parts]


def test_rows_that_are_too_long_are_named() -> None:
    batch = of_lengths([3, 9, 10])
    with pytest.raises(RowTooLong, match="task 0, rollout 1 has 9; task 0, rollout 2 has 10; raise max_tokens"):
        batch.minibatches(max_tokens=8)
    with pytest.raises(ValueError, match="max_tokens: found 0"):
        batch.minibatches(max_tokens=0)


def test_inexact_trajectories_are_named_with_the_remedy() -> None:
    require_exact([group(trajectory(0))])
    with pytest.raises(InexactTrajectory, match=r"task 0, rollout 0: its token ids were encoded .* inexact=\"skip\""):
        require_exact([group(trajectory(0, token_source="reencoded"))])
    record = trajectory(0)
    record.messages[3].logprobs = None
    with pytest.raises(InexactTrajectory, match="it has no log-probabilities"):
        require_exact([group(record)])
    agent = branching(0, 0, 1.0)
    assert agent.branches is not None
    agent.branches[0].messages[3].logprobs = None
    with pytest.raises(InexactTrajectory, match="it has no log-probabilities"):
        require_exact([group(agent)])
    # Kept ones show it in every loss that uses them.
    assert np.isnan(batch_of(group(record)).logprobs).tolist() == [[False] * 5 + [True]]


def test_a_function_of_advantages_must_return_a_number_for_each_reward() -> None:
    with pytest.raises(ValueError, match="for 1 rewards of task 0 the function returned"):
        make_batch([group(trajectory(0))], advantages=lambda rewards: rewards[:0], pad_id=0)
