"""Paths of agents' trajectories in files for trainers: each response is learned once, in its own context."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet
import pytest
from hypothesis import assume, given

from kuberoll_workers.analysis.export.exporting import export_run
from kuberoll_workers.analysis.export.views import token_view
from kuberoll_workers.analysis.paths import paths
from kuberoll_workers.data.messages import token_array
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.players.session_trajectories import agent_trajectory
from kuberoll_workers.policy.agent_sessions import ClosedSession
from kuberoll_workers.serving.openai_api.continuation import Texts
from kuberoll_workers.serving.sessions.store import Sessions
from kuberoll_workers.serving.sessions.trajectories import trajectories
from tests.analysis.test_export import run_of, trajectory
from tests.rollouts import fakes
from tests.rollouts.test_trajectory import outcome
from tests.serving.test_session_tree import calls, sampled

TEXTS = Texts(lambda ids: " ".join(map(str, ids)), lambda _: token_array(), None, lambda text, *_: (text, []))


def played(made: list[tuple[list[int], list[int]]], index: int = 0) -> TrajectoryRecord:
    """The trajectory of an agent with these calls, each its prompt and its response."""
    sessions = Sessions("r")
    session = sessions.open()
    for prompt, response in made:
        session.record(sampled(prompt, response))
    found = {**session.state(), "trajectories": trajectories(session, TEXTS)}
    closed = msgspec.json.decode(msgspec.json.encode(found), type=ClosedSession)
    end = outcome(3.0, terminated=True, reward_parts={"a": 1.0, "b": 2.0})
    sample = fakes.sample(5, index, prompt="hi")
    return agent_trajectory(sample, fakes.settings(), closed, end, TEXTS.decode).record()


def asked_in(made: list[tuple[int, list[int], list[int]]]) -> list[tuple[list[int], list[int]]]:
    """Prompt and response of each call, which goes on with any earlier one, or with none.

    Responses of its own tell a call apart.
    """
    asked: list[tuple[list[int], list[int]]] = []
    for number, (base, more, response) in enumerate(made):
        before = asked[base % len(asked)] if asked and base >= 0 else ([7], [])
        asked.append(([*before[0], *before[1], *more], [100 + number] * len(response)))
    return asked


@given(calls)
def test_each_response_is_learned_once_and_every_path_is_what_the_policy_saw(
    made: list[tuple[int, list[int], list[int]]],
) -> None:
    assume(any(response for _, _, response in made))
    asked = asked_in(made)
    wholes = [prompt + response for prompt, response in asked]
    record = played(asked)
    learned: Counter[int] = Counter()
    for _, path in paths(record):
        tokens = token_view(path)
        ids = [*tokens.prompt_ids, *tokens.completion_ids]
        assert ids in wholes
        assert tokens.logprobs is not None
        own = [token for token, mask in zip(tokens.completion_ids, tokens.mask, strict=True) if mask]
        learned.update(own)
        assert sum(tokens.mask) == path.tokens.generated
        assert len(tokens.prompt_ids) == path.tokens.prompt
        assert len(path.rewards) == path.turn_count == len(path.timing.ended_at) == len(path.timing.generation_seconds)
        assert (sum(path.rewards), path.total_reward) == (3.0, 3.0)
        assert {name: sum(parts) for name, parts in path.reward_parts.items()} == {"a": 1.0, "b": 2.0}
    assert learned == Counter(token for _, response in asked for token in response)


FORKED = [([1], [2]), ([1, 2, 3], [4, 4]), ([1, 2, 9], [5])]
PREFIXES = {
    "trl": ("prompt_ids", "completion_ids", "env_mask"),
    "verl": ("prompt_ids", "response_ids", "response_mask"),
    "skyrl": ("prompt_token_ids", "response_ids", "loss_masks"),
}


@pytest.mark.parametrize("to", sorted(PREFIXES))
def test_a_branch_is_a_row_whose_prompt_is_what_it_shares(tmp_path: Path, to: str) -> None:
    run = run_of(tmp_path / "run", played(FORKED), trajectory(6))
    exported = export_run(run, to=to, output=tmp_path)
    assert (exported.counts.selected, exported.counts.branches) == (2, 1)
    rows = [row for row in pyarrow.parquet.read_table(exported.path).to_pylist() if row.get("task_index", 5) == 5]
    found = {row["path"]: [row[name] for name in PREFIXES[to]] for row in rows if row[PREFIXES[to][0]][:1] == [1]}
    assert found[1] == [[1, 2, 9], [5], [1]]
    if to != "skyrl":
        assert found[0] == [[1], [2, 3, 4, 4], [1, 0, 1, 1]]
    own = export_run(run, to=to, output=tmp_path, branches=False, force=True)
    assert own.counts.branches == 0
    assert pyarrow.parquet.read_table(own.path).num_rows == 2


def test_the_paths_of_a_trajectory_are_one_rollout_to_slime(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    run = run_of(tmp_path / "run", played(FORKED), trajectory(5, 1), trajectory(6))
    samples = torch.load(export_run(run, to="slime", output=tmp_path).path)["samples"]
    assert [sample["rollout_id"] for sample in samples] == [0, 0, 1, 2]
    assert [sample["index"] for sample in samples] == [0, 1, 2, 3]
    assert [sample["metadata"]["path"] for sample in samples] == [0, 1, 0, 0]


def test_chats_say_what_another_path_teaches(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", played(FORKED))
    chats = [json.loads(line) for line in export_run(run, to="openai-chat", output=tmp_path).path.open()]
    weights: list[Any] = [
        [message.get("weight") for message in chat["messages"] if message["role"] == "assistant"] for chat in chats
    ]
    assert weights == [[None, None], [0, None]]
    talks = [json.loads(line) for line in export_run(run, to="sharegpt", output=tmp_path).path.open()]
    assert [talk["id"] for talk in talks] == ["5-0", "5-0-1"]


def test_gym_counts_a_rollout_once(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", played(FORKED))
    exported = export_run(run, to="nemo-gym", output=tmp_path)
    assert len(exported.path.read_text().splitlines()) == 1
