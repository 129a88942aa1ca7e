"""`kuberoll export --to nemo-gym`, read by NeMo Gym's own commands, models and statistics."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kuberoll_api.manifest.loading import load_job
from kuberoll_workers.analysis.export.nemo_gym import materialized
from kuberoll_workers.analysis.export.nemo_gym_files import TaskRows
from kuberoll_workers.data.messages import Message, token_array
from kuberoll_workers.data.record import FailureRecord, TrajectoryRecord, encode_line
from kuberoll_workers.dataset.expansion import PromptGroup
from kuberoll_workers.dataset.inputs import prompt_groups
from tests.adapters.libraries.foreign import ROOT, packages, server
from tests.adapters.libraries.support import run
from tests.adapters.libraries.test_nemo_gym import REQUIREMENTS, examples
from tests.local.support import COMMAND, manifest
from tests.policy.openai_serving import tokenizer_with_ends

pytestmark = pytest.mark.processes

RESPONSES = [
    '<think>One.</think>I add. <tool_call>{"name": "increment_counter", "arguments": {"count": 1}}</tool_call>',
    '<tool_call>{"name": "get_counter_value", "arguments": {}}</tool_call>',
    "<tool_call>{</tool_call>",
    "Done.",
]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def failed(task: int, rollout: int) -> FailureRecord:
    return FailureRecord(
        task_index=task,
        rollout_index=rollout,
        task_name="counter",
        idx=None,
        kind="infrastructure",
        stage="step",
        cause="the server was gone",
        tries=3,
        attempt=0,
        turn_count=0,
        seed=5,
        messages=[Message("user", "Count.", token_array([1, 2]))],
    )


def own_rows(nemo_gym: Path) -> list[dict[str, Any]]:
    rows = examples(nemo_gym, "example_session_state_mgmt")[:3]
    for number, row in enumerate(rows):
        row["agent_ref"] = {"type": "responses_api_agents", "name": "counter"}
        # Not the order of the rows.
        row["_ng_task_index"] = 7 - number
        row["responses_create_params"]["temperature"] = 0.5 + number / 4
        row["responses_create_params"]["metadata"] = {"extra_body": '{"top_k": 5}', "note": "mine"}
    return rows


def gym(nemo_gym: Path, place: Path, *arguments: str) -> str:
    """Output of one of the package's commands."""
    command = [sys.executable, "-c", "from nemo_gym.cli.main import main; main()", *arguments]
    return python(nemo_gym, place, command)


def python(nemo_gym: Path, place: Path, command: list[str]) -> str:
    path = os.pathsep.join(map(str, (nemo_gym, ROOT)))
    environment = {**os.environ, "PYTHONPATH": path, "WANDB_MODE": "disabled"}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return done.stdout


@pytest.mark.long
def test_gym_s_own_commands_read_an_exported_run(tmp_path: Path) -> None:
    nemo_gym = packages("nemo-gym-0.4.0", REQUIREMENTS)
    rows = own_rows(nemo_gym)
    (model := tmp_path / "model").mkdir()
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with ExitStack() as stack:
        arguments = ["serve_nemo_gym.py", "example_session_state_mgmt"]
        url = stack.enter_context(server(*arguments, path=nemo_gym, log=tmp_path / "server"))
        records = run(
            tmp_path,
            {"name": "counter", "type": "nemo_gym", "config": {"url": url}},
            RESPONSES,
            model=tokenizer_with_ends(model),
            dataset={"source": {"uri": str(tmp_path / "rows.jsonl")}, "repeats": 4},
            rollout={"maxTurns": 6},
        )
        assert len(records) == 12
        assert len({record.turn_count for record in records}) > 1
        lost = failed(1, 4)
        with (tmp_path / "out" / "failures.jsonl").open("ab") as journal:
            journal.write(encode_line(lost))
        rollouts = export(tmp_path)
        inputs, failures, metrics = (
            rollouts.with_name(f"rollouts_{name}")
            for name in ("materialized_inputs.jsonl", "failures.jsonl", "aggregate_metrics.json")
        )

        # The package's models accept all rows; its statistics are those of the file.
        script = str(Path(__file__).parent / "check_nemo_gym_rows.py")
        computed = python(nemo_gym, tmp_path, [sys.executable, script, str(rollouts), str(inputs)])
        (entry,) = json.loads(metrics.read_text())
        assert entry.pop("agent_ref") == {"name": "counter"}
        assert_equal_numbers(entry, json.loads(computed.splitlines()[-1]))

        # Resuming finds nothing to do, and the agent's server computes the same aggregates.
        host, port = urlsplit(url).hostname, urlsplit(url).port
        config = json.dumps({"counter": {"responses_api_agents": {"counter": {"host": host, "port": port}}}})
        head = stack.enter_context(server("serve_nemo_gym_head.py", config, path=nemo_gym, log=tmp_path / "head"))
        before = {path: path.read_bytes() for path in (rollouts, inputs, failures)}
        ours = json.loads(metrics.read_text())
        metrics.unlink()
        text = gym(
            nemo_gym, tmp_path, "eval", "run", "--no-serve", "--resume", "--input", str(tmp_path / "rows.jsonl"),
            "--output", str(rollouts), "+head_server.host=127.0.0.1", f"+head_server.port={urlsplit(head).port}",
        )  # fmt: skip
        for line in (
            "- 13 original input rows",
            "- 12 rows already done",
            "- 1 prior failure attempts",
            "- 1 sidecar-terminal",
            "- 0 rows that still need to be run",
        ):
            assert line in text
        assert {path: path.read_bytes() for path in before} == before
        (theirs,) = json.loads(metrics.read_text())
        assert_equal_numbers(ours[0], theirs)

        merged = tmp_path / "merged.jsonl"
        gym(
            nemo_gym, tmp_path, "eval", "aggregate", "--input-glob", str(rollouts), "--output", str(merged),
            "+head_server.host=127.0.0.1", f"+head_server.port={urlsplit(head).port}",
        )  # fmt: skip
        assert sorted(map(str, read(merged))) == sorted(map(str, read(rollouts)))
        assert_equal_numbers(ours, json.loads(merged.with_name("merged_aggregate_metrics.json").read_text()))

        # Its reward profile is over the tasks' rows.
        profile = ["eval", "profile", "--inputs", str(inputs), "--rollouts", str(rollouts)]
        text = gym(nemo_gym, tmp_path, *profile, "++allow_partial_rollouts=true")
        assert "Reward profile completion: 12/13 rollout rows" in text
    profiled = read(rollouts.with_name("rollouts_reward_profiling.jsonl"))
    rewards: dict[int, float] = defaultdict(float)
    for record in records:
        rewards[7 - record.task_index] += record.total_reward
    assert {task["_ng_task_index"]: task["mean/reward"] * 4 for task in profiled} == pytest.approx(dict(rewards))
    assert [task["num_rollouts"] for task in profiled] == [4] * 3

    # The inputs are the rows as they were, with the numbers and the seed of each rollout.
    ended: list[TrajectoryRecord | FailureRecord] = [*records, lost]
    seeds = {(7 - record.task_index, record.rollout_index): record.seed for record in ended}
    for row in read(inputs):
        (original,) = (given for given in rows if given["_ng_task_index"] == row["_ng_task_index"])
        extra = json.loads(row["responses_create_params"]["metadata"].pop("extra_body"))
        seed = seeds.pop((row["_ng_task_index"], row.pop("_ng_rollout_index")))
        assert extra == {"top_k": 5, **({} if seed is None else {"seed": seed})}
        row["responses_create_params"]["metadata"]["extra_body"] = '{"top_k": 5}'
        assert row == original
    assert not seeds
    (row,) = read(failures)
    assert (row["_ng_failure_class"], row["_ng_failure_terminal"]) == ("infrastructure", True)
    assert "reward" not in row

    # KubeRoll reads the inputs with the same tasks and rollouts.
    overrides = (f"spec.dataset={json.dumps({'source': {'uri': str(inputs)}, 'repeats': 1})}",)
    job = load_job(tmp_path / "job.yaml", overrides)
    again = [
        (group.row.task_id, *group.rollout_indexes)
        for group in prompt_groups(job, base=tmp_path, environment=lambda name: pytest.fail(name))
    ]
    assert sorted(again) == sorted((7 - record.task_index, record.rollout_index) for record in ended)


def test_inputs_that_gym_materialized_are_a_dataset(tmp_path: Path) -> None:
    """With Gym's tasks and rollouts, and its settings; and each of them again as it was."""
    nemo_gym = packages("nemo-gym-0.4.0", REQUIREMENTS)
    rows = own_rows(nemo_gym)
    rows[1]["responses_create_params"].pop("metadata")
    given = tmp_path / "rows.jsonl"
    given.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    script = str(Path(__file__).parent / "materialize_nemo_gym.py")
    python(nemo_gym, tmp_path, [sys.executable, script, str(given), str(tmp_path / "rollouts.jsonl"), "3"])
    inputs = tmp_path / "rollouts_materialized_inputs.jsonl"
    materialized_rows = read(inputs)
    assert len(materialized_rows) == 9
    environment = {"name": "counter", "type": "nemo_gym", "config": {"url": "http://127.0.0.1:1"}}
    dataset = {"source": {"uri": str(inputs)}, "repeats": 1}
    job = load_job(manifest(tmp_path / "job.yaml", environments=[environment], dataset=dataset), ())

    def groups() -> Iterator[PromptGroup]:
        return prompt_groups(job, base=tmp_path, environment=lambda name: pytest.fail(name))

    read_rows = list(groups())
    assert [(group.row.task_id, *group.rollout_indexes) for group in read_rows] == [
        (row["_ng_task_index"], row["_ng_rollout_index"]) for row in materialized_rows
    ]
    assert [group.row.sampling for group in read_rows] == [
        {"temperature": 0.25, **({} if task == 6 else {"top_k": 5})} for task in (7, 6, 5) for _ in range(3)
    ]
    with (tmp_path / "tasks").open("w+b") as file:
        tasks = TaskRows(file, groups())
        for row in materialized_rows:
            ended = failed(7 - row["_ng_task_index"], row["_ng_rollout_index"])
            # Its seed is the only thing that is not the row's.
            seed = json.loads(row["responses_create_params"]["metadata"]["extra_body"])["seed"]
            found, number = tasks.of(ended)
            again = materialized(dataclasses.replace(ended, seed=seed), found, number=number)
            for one in (again, row):
                text = one["responses_create_params"]["metadata"].pop("extra_body")
                one["responses_create_params"]["metadata"]["extra"] = json.loads(text)
            assert again == row


def export(place: Path) -> Path:
    """The rollouts of a run, exported with its manifest."""
    rollouts = place / "gym" / "rollouts.jsonl"
    given = ["--to", "nemo-gym", "--output", str(rollouts), "--manifest", str(place / "job.yaml")]
    given += ["--allow", "simulated"]
    command = [*COMMAND, "export", str(place / "out"), *given]
    other = subprocess.run([*command, "--set", "spec.dataset.limit=2"], capture_output=True, text=True, check=False)
    assert (other.returncode, rollouts.exists()) == (2, False)
    assert "its dataset is not the one" in other.stderr
    subprocess.run(command, check=True, capture_output=True)
    assert_tokens_are_one_sequence(rollouts)
    return rollouts


def assert_tokens_are_one_sequence(rollouts: Path) -> None:
    """As NeMo RL requires of the items with tokens: each prompt begins with all that was read and generated before."""
    for row in read(rollouts):
        known: list[int] = []
        turns = [item for item in row["response"]["output"] if "generation_token_ids" in item]
        assert turns
        for item in turns:
            assert item["prompt_token_ids"][: len(known)] == known
            assert len(item["generation_log_probs"]) == len(item["generation_token_ids"]) > 0
            known = item["prompt_token_ids"] + item["generation_token_ids"]


def assert_equal_numbers(ours: Any, theirs: Any, place: str = "") -> None:
    """Equal JSON, with numbers equal up to rounding."""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), place
        for key in ours:
            assert_equal_numbers(ours[key], theirs[key], f"{place}.{key}")
    elif isinstance(ours, list):
        assert len(ours) == len(theirs), place
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_equal_numbers(one, other, f"{place}[{number}]")
    else:
        assert ours == pytest.approx(theirs), place
