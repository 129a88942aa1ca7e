"""NeMo Gym's files of a run, from its trajectories alone; its own commands read them in tests/adapters/libraries."""

from __future__ import annotations

import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kuberoll_api.model.dataset import PromptTemplate
from kuberoll_workers.analysis.export.exporting import export_run
from kuberoll_workers.analysis.export.formats import ExportError
from kuberoll_workers.analysis.export.nemo_gym import materialized
from kuberoll_workers.analysis.export.nemo_gym_files import TaskRows
from kuberoll_workers.analysis.export.selection import Selection
from kuberoll_workers.commands.export import export as command
from kuberoll_workers.data.record import FailureRecord, TrajectoryRecord, encode_line
from kuberoll_workers.dataset.expansion import expand
from kuberoll_workers.dataset.gym_rows import row_of_dataset
from kuberoll_workers.dataset.rows import RowPosition, parse_row
from tests.analysis.test_export import CALLING, calling, run_of, trajectory


def parsed(row: dict[str, Any], template: PromptTemplate | None = None) -> Any:
    return parse_row(row, place=RowPosition("rows.jsonl:", 1), task_names=["puzzle"], template=template)


def failure(task_index: int, rollout_index: int, name: str = "puzzle") -> FailureRecord:
    made = trajectory(task_index, rollout_index, turns=0)
    return FailureRecord(
        task_index=task_index,
        rollout_index=rollout_index,
        task_name=name,
        idx=None,
        kind="environment",
        stage="step",
        cause="KeyError: 'moves'",
        tries=1,
        attempt=0,
        turn_count=0,
        seed=None,
        messages=made.messages,
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def export(tmp_path: Path, *records: TrajectoryRecord | FailureRecord, **options: Any) -> Path:
    run = run_of(tmp_path / "run", *(record for record in records if isinstance(record, TrajectoryRecord)))
    failed = [record for record in records if isinstance(record, FailureRecord)]
    (tmp_path / "run" / "failures.jsonl").write_bytes(b"".join(map(encode_line, failed)))
    options = {"output": tmp_path / "gym" / "rollouts.jsonl", **options}
    return export_run(run, to="nemo-gym", **options).path


def test_a_rollout_has_its_tokens_on_the_last_item_of_each_turn(tmp_path: Path) -> None:
    (row,) = lines(export(tmp_path, replace(calling(), seed=None)))
    items = row["response"]["output"]
    assert [item["type"] for item in items] == [
        "message", "function_call", "function_call_output", "message", "function_call_output", "message",
    ]  # fmt: skip
    assert items[0]["content"][0]["text"] == "I look.\n"
    assert (items[1]["name"], json.loads(items[1]["arguments"])) == ("price", {"item": "pér"})
    assert "<tool_call>" in CALLING
    tokens = [(item["prompt_token_ids"], item["generation_token_ids"]) for item in items if "prompt_token_ids" in item]
    assert [item["type"] for item in items if "prompt_token_ids" in item] == ["function_call", "message", "message"]
    assert tokens == [
        ([1, 2, 3, 4], [11, 20]),
        ([1, 2, 3, 4, 11, 20, 30, 31], [12, 20]),
        ([1, 2, 3, 4, 11, 20, 30, 31, 12, 20, 30, 31], [13, 20]),
    ]
    assert items[1]["generation_log_probs"] == [-0.5, -0.25]
    assert row["response"]["usage"]["total_tokens"] == 4 + 8 + 12 + 6
    assert row["agent_ref"] == {"type": "responses_api_agents", "name": "puzzle"}
    assert row["responses_create_params"]["tools"][0]["name"] == "price"
    assert "metadata" not in row["responses_create_params"]
    # The state of an environment of another kind is that of the end, which is no field of a row.
    assert ("moves" in row, row["kuberoll"]["metadata"]["moves"]) == (False, 0)


def test_tokens_that_are_not_the_sampled_ones_are_left_out(tmp_path: Path) -> None:
    rollouts = export(tmp_path, replace(trajectory(), token_source="reencoded"), trajectory(1, logprobs=False))
    for row in lines(rollouts):
        assert not any("generation_token_ids" in item for item in row["response"]["output"])
        assert [item["role"] for item in row["response"]["output"]] == ["assistant", "user", "assistant"]


def test_a_response_that_was_cut_is_incomplete(tmp_path: Path) -> None:
    record = trajectory(turns=1, stop_reason="truncated")
    record.messages[2].truncated = True
    (row,) = lines(export(tmp_path, record))
    assert row["response"]["status"] == "incomplete"
    assert row["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_failures_have_an_input_and_a_class_but_no_reward(tmp_path: Path) -> None:
    rollouts = export(tmp_path, trajectory(0), trajectory(2), failure(0, 1), failure(1, 0, "other"))
    inputs = lines(rollouts.with_name("rollouts_materialized_inputs.jsonl"))
    failures = lines(rollouts.with_name("rollouts_failures.jsonl"))
    keys = [[(row["_ng_task_index"], row["_ng_rollout_index"]) for row in rows] for rows in (inputs, failures)]
    assert keys == [[(0, 0), (2, 0), (0, 1), (1, 0)], [(0, 1), (1, 0)]]
    assert [json.loads(row["responses_create_params"]["metadata"]["extra_body"]) for row in inputs[:2]] == [
        {"seed": 7}
    ] * 2
    assert failures[0]["error_message"] == "KeyError: 'moves'"
    assert not any("reward" in row for row in failures)
    (entry,) = json.loads(rollouts.with_name("rollouts_aggregate_metrics.json").read_text())
    assert (entry["key_metrics"]["mean/reward"], len(entry["group_level_metrics"])) == (1.0, 2)
    chosen = Selection(environments=frozenset({"puzzle"}))
    export(tmp_path, trajectory(0), trajectory(2), failure(0, 1), failure(1, 0, "other"), selection=chosen, force=True)
    assert len(lines(rollouts.with_name("rollouts_failures.jsonl"))) == 1


def test_no_file_is_overwritten_and_all_appear_together(tmp_path: Path) -> None:
    (tmp_path / "gym").mkdir()
    there = tmp_path / "gym" / "rollouts_failures.jsonl"
    there.write_text("mine")
    with pytest.raises(ExportError, match=r"rollouts_failures\.jsonl exists already"):
        export(tmp_path, trajectory())
    assert (list(there.parent.iterdir()), there.read_text()) == ([there], "mine")
    with pytest.raises(ExportError, match="no trajectory is selected"):
        export(tmp_path, trajectory(), selection=Selection(min_reward=2.0), force=True)
    assert list(there.parent.iterdir()) == [there]
    export(tmp_path, trajectory(), force=True)
    # Without failures it is empty, as Gym leaves it.
    assert (len(list(there.parent.iterdir())), there.read_text()) == (4, "")


def test_rows_of_other_forms_become_gyms() -> None:
    tool = {"type": "function", "function": {"name": "price", "description": "", "parameters": {"type": "object"}}}
    row = parsed(
        {
            "prompt": "2+2?",
            "metadata": {"expected_answer": "4"},
            "sampling": {"maxTokens": 9, "topK": 3, "temperature": 0.5},
            "stop_strings": ["\n"],
            "tools": [tool],
        }
    )
    assert row_of_dataset(row) == {
        "expected_answer": "4",
        "stop_strings": ["\n"],
        "agent_ref": {"type": "responses_api_agents", "name": "puzzle"},
        "responses_create_params": {
            "input": [{"type": "message", "role": "user", "content": "2+2?"}],
            "max_output_tokens": 9,
            "temperature": 0.5,
            "tools": [
                {
                    "type": "function",
                    "name": "price",
                    "description": "",
                    "parameters": {"type": "object"},
                    "strict": False,
                }
            ],
            "metadata": {"extra_body": '{"top_k": 3}'},
        },
    }
    # Read again, it is the same row.
    again = parsed(row_of_dataset(row))
    assert (again.messages, again.metadata, again.sampling, again.stop_strings, again.tools) == (
        row.messages, row.metadata, row.sampling, row.stop_strings, row.tools,
    )  # fmt: skip


def test_a_template_s_prompt_is_the_input() -> None:
    given = {"responses_create_params": {"input": [], "temperature": 1}, "question": "2+2?", "_ng_rollout_index": 3}
    row = row_of_dataset(parsed(given, PromptTemplate(system="Add.", user="{question}")))
    assert [said["content"] for said in row["responses_create_params"]["input"]] == ["Add.", "2+2?"]
    assert (row["question"], row["responses_create_params"]["temperature"], "_ng_rollout_index" in row) == (
        "2+2?", 1, False,
    )  # fmt: skip


@pytest.mark.parametrize(("numbers", "found"), [((5, 3), (5, 3)), ((5, None), (None, None))])
def test_gyms_numbers_of_tasks_are_kept_if_all_have_one(
    numbers: tuple[int | None, ...], found: tuple[int | None, ...]
) -> None:
    rows = [
        {"responses_create_params": {"input": str(place)}, **({} if number is None else {"_ng_task_index": number})}
        for place, number in enumerate(numbers)
    ]
    tasks = TaskRows(BytesIO(), expand(map(parsed, rows), {"puzzle": 1}))
    assert tuple(tasks.of(trajectory(task))[1] for task in range(2)) == found
    with pytest.raises(ExportError, match="the dataset has 2 tasks, and the run a task 2"):
        tasks.of(trajectory(2))


def test_the_seed_of_a_sample_replaces_that_of_the_row() -> None:
    row = row_of_dataset(parsed({"responses_create_params": {"input": "a", "seed": 5, "top_k": 2}}))
    for seed, extra in ((7, {"top_k": 2, "seed": 7}), (None, {"top_k": 2})):
        params = materialized(replace(trajectory(), seed=seed), row)["responses_create_params"]
        assert "seed" not in params
        found = json.loads(params["metadata"]["extra_body"])
        assert found == (extra if seed is not None else {"top_k": 2, "seed": 5})


def test_the_manifest_is_that_of_the_run(tmp_path: Path) -> None:
    run_of(tmp_path / "run", trajectory())
    for arguments, text in (
        (["--to", "trl", "--manifest", "job.yaml"], "--manifest and --set are for --to nemo-gym"),
        (["--to", "nemo-gym", "--set", "a=b"], "which is missing"),
        (["--to", "nemo-gym", "--environment-role", "tool"], "use --environment-role user"),
    ):
        done = CliRunner().invoke(command, [str(tmp_path / "run"), *arguments])
        assert (done.exit_code, text in done.output) == (2, True), done.output
