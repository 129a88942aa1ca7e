"""Jobs whose agents are NeMo Gym's own servers, compared with the package's own collection of the same rows."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kuberoll_workers.analysis.export.nemo_gym_metrics import logged
from kuberoll_workers.data.record import TrajectoryRecord, encode_line
from tests.adapters.libraries.gym_agents import KEY, World, rows_of, world, write_rows
from tests.adapters.libraries.test_nemo_gym_export import (
    assert_equal_numbers,
    assert_tokens_are_one_sequence,
    gym,
    read,
)
from tests.local.support import (
    COMMAND,
    manifest,
    run_to_end,
    running,
    trajectories,
    wait_for_trajectories,
    wait_until_none_is_left,
)

pytestmark = pytest.mark.processes

REPEATS = 2
VARIABLE = "TEST_POLICY_KEY"


@pytest.fixture(autouse=True)
def policy_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, KEY)


@pytest.fixture(scope="module")
def gym_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("world")) as made:
        yield made


def job(place: Path, made: World, rows: list[dict[str, Any]], *, dataset_repeats: int = REPEATS, **spec: Any) -> Path:
    """A manifest of a job whose environment is Gym's agents."""
    uri = str(write_rows(place / "rows.jsonl", rows))
    fields: dict[str, Any] = {
        "generation": {
            "backend": "External",
            "external": {"url": made.policy, "apiKeyVariable": VARIABLE},
            "model": {"source": str(made.tokenizer)},
            "sampling": {"maxTokens": 200, "seed": 3},
        },
        "environments": [{"name": "gym", "agent": {"nemoGym": {"url": made.head}}}],
        "dataset": {"source": {"uri": uri}, "repeats": dataset_repeats},
        **spec,
    }
    return manifest(place / "job.yaml", **fields)


def exported(place: Path, output: Path) -> Path:
    rollouts = place / "exported" / "rollouts.jsonl"
    given = ["--to", "nemo-gym", "--output", str(rollouts), "--manifest", str(place / "job.yaml")]
    given += ["--allow", "simulated"]
    subprocess.run([*COMMAND, "export", str(output), *given], check=True, capture_output=True)
    return rollouts


def key(row: dict[str, Any]) -> tuple[int, int]:
    return row["_ng_task_index"], row["_ng_rollout_index"]


def said(row: dict[str, Any]) -> list[Any]:
    """What is in a response, without ids and times."""
    dropped = {"id", "call_id"}
    return [{name: value for name, value in item.items() if name not in dropped} for item in row["response"]["output"]]


def told(row: dict[str, Any]) -> dict[str, Any]:
    """What a server has told of a rollout, without what it was asked and what differs from run to run."""
    return {
        name: value
        for name, value in row.items()
        if name not in ("response", "responses_create_params", "kuberoll") and not name.startswith("_")
    }


def test_rewards_are_those_of_gyms_own_collection(tmp_path: Path, gym_world: World) -> None:
    rows = rows_of(gym_world.nemo_gym, 4)
    output = tmp_path / "out"
    code, text = run_to_end(job(tmp_path, gym_world, rows), "--output", output, "--metrics-port", "0")
    assert code == 0, text
    records = trajectories(output)
    assert len(records) == len(rows) * REPEATS
    for record in records:
        check(record)
    assert {prompt for record in records for prompt in prompts_of(record)} <= gym_world.engine.read
    theirs = collected(tmp_path, gym_world)
    found = {(record.task_index, record.rollout_index): record.total_reward for record in records}
    assert found == {place: row["reward"] for place, row in theirs.items()}
    assert {-1.0, 0.0, 1.0} >= set(found.values()) >= {0.0, 1.0}

    # The agents' own metrics are those that Gym's collection gets.
    aggregates = json.loads((output / "aggregate_metrics.json").read_text())
    metrics = aggregates["environments"]["gym"]["environment_metrics"]
    theirs_of = json.loads((tmp_path / "theirs" / "rollouts_aggregate_metrics.json").read_text())
    assert metrics
    assert_equal_numbers(metrics, logged(theirs_of))

    # What is exported is what `/run` has returned.
    rollouts = exported(tmp_path, output)
    ours = {key(row): row for row in read(rollouts)}
    assert ours.keys() == theirs.keys()
    for place, row in ours.items():
        other = theirs[place]
        assert told(row) == told(other)
        assert said(row) == said(other)
        assert row["response"]["usage"] == other["response"]["usage"]
        # The same prompt with other settings: those of the job are sent with the row.
        assert row["responses_create_params"]["input"] == other["responses_create_params"]["input"]
        assert row["responses_create_params"]["max_output_tokens"] == 200
    assert_tokens_are_one_sequence(rollouts)


def check(record: TrajectoryRecord) -> None:
    """A trajectory is what the engine read and sampled, turn by turn."""
    assert record.branches is None
    assert record.continuity is not None
    assert record.continuity.get("new") == 1
    assert sum(record.continuity.values()) == record.turn_count
    assert record.token_source == "engine"
    responses = [message for message in record.messages if message.role == "assistant"]
    assert len(responses) == record.turn_count
    for message in responses:
        assert message.logprobs is not None
        assert len(message.logprobs) == len(message.token_ids) > 0
        assert not message.policy_versions
    assert record.metadata is not None
    assert record.stop_reason == "terminated"
    agent = record.metadata["nemo_gym"]["agent"]
    if agent == "example_single_tool_call_simple_agent":
        assert record.turn_count == 2
        assert [message.role for message in record.messages][:3] == ["developer", "user", "assistant"]
        answers = [message for message in record.messages if message.role == "tool"]
        assert answers
        assert all("is cold" in message.content for message in answers)
        assert len(record.messages) == 5 + len(answers)
    elif agent == "blackjack_gymnasium_agent":
        hands = [message.content for message in record.messages if message.content.startswith("Your hand")]
        assert len(hands) == record.turn_count


def prompts_of(record: TrajectoryRecord) -> Iterator[tuple[int, ...]]:
    """What the policy read in each turn."""
    known: list[int] = []
    for message in record.messages:
        if message.role == "assistant":
            yield tuple(known)
        known += message.token_ids


def collected(place: Path, made: World) -> dict[tuple[int, int], dict[str, Any]]:
    """Rollouts of the same rows by the package's own command, by task and rollout."""
    head = urlsplit(made.head)
    rollouts = place / "theirs" / "rollouts.jsonl"
    rollouts.parent.mkdir()
    gym(
        made.nemo_gym, place, "eval", "run", "--no-serve", "--input", str(place / "rows.jsonl"),
        "--output", str(rollouts), f"+num_repeats={REPEATS}", "+num_samples_in_parallel=4",
        f"+head_server.host={head.hostname}", f"+head_server.port={head.port}",
    )  # fmt: skip
    return {key(row): row for row in read(rollouts)}


def test_a_killed_run_is_resumed(tmp_path: Path, gym_world: World) -> None:
    rows = rows_of(gym_world.nemo_gym, 4)
    output = tmp_path / "out"
    given = job(tmp_path, gym_world, rows, rollout={"concurrency": 3})
    gym_world.hold_after(12)
    try:
        with running(given, "--output", output, "--metrics-port", "0") as run:
            run_id = run.run_id()
            wait_for_trajectories(run, output, 3)
            run.process.send_signal(signal.SIGKILL)
            run.process.wait()
            wait_until_none_is_left(run_id)
    finally:
        gym_world.release()
    before = {record.key: encode_line(record) for record in trajectories(output)}
    assert 3 < len(before) < len(rows) * REPEATS
    code, text = run_to_end(given, "--output", output, "--metrics-port", "0", "--resume")
    assert code == 0, text
    records = trajectories(output)
    assert len(records) == len({record.key for record in records}) == len(rows) * REPEATS
    # Those that were complete were not run again.
    assert {record.key: encode_line(record) for record in records if record.key in before} == before
    for record in records:
        check(record)
    theirs = collected(tmp_path, gym_world)
    assert {tuple(record.key): record.total_reward for record in records} == {
        place: row["reward"] for place, row in theirs.items()
    }


def test_failures_say_what_to_do(tmp_path: Path) -> None:
    """A model server that returns no token ids, and a row for an agent that there is not."""
    with world(tmp_path, "--without-tokens") as made:
        known = rows_of(made.nemo_gym, 1)
        unknown = {**known[0], "agent_ref": {"name": "chess"}}
        output = tmp_path / "out"
        given = job(tmp_path, made, [*known, unknown], dataset_repeats=1)
        code, text = run_to_end(given, "--output", output, "--metrics-port", "0")
    assert code != 0, text
    assert trajectories(output) == []
    failures = [json.loads(line) for line in (output / "failures.jsonl").read_text().splitlines()]
    assert [failure["tries"] for failure in failures] == [1] * 4
    *without, other = sorted(failures, key=lambda failure: failure["task_index"])
    assert all("set return_token_id_information: true" in failure["cause"] for failure in without)
    assert other["kind"] == "data"
    assert "agent_ref.name: found 'chess'; the agents that" in other["cause"]
    assert "blackjack_gymnasium_agent, example_single_tool_call_simple_agent, mcqa_simple_agent" in other["cause"]
