"""Exports for trainers whose packages cannot be installed beside KubeRoll's: their loaders, from their sources.

`KUBEROLL_TEST_TRAINERS` is a directory with checkouts: `slime`, `SkyRL`, `prime-rl` and `AReaL`; and with `packages`,
what these import and this environment lacks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kuberoll_workers.analysis.export.exporting import export_run
from kuberoll_workers.analysis.export.formats import ExportError
from kuberoll_workers.data.record import TrajectoryRecord
from tests.analysis.test_export import calling, export, run_of, trajectory
from tests.analysis.test_paths import FORKED, played

SOURCES = os.environ.get("KUBEROLL_TEST_TRAINERS", "")
PLACES = ("slime", "SkyRL", "prime-rl/src", "prime-rl/packages/prime-rl-configs/src", "AReaL", "packages")

IDS = [1, 2, 3, 4, 11, 20, 30, 31, 31, 12, 20]
MASK = [0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1]
LOGPROBS = [0.0] * 4 + [-0.1, -0.25, 0, 0, 0, -0.2, -0.25]


def records() -> list[TrajectoryRecord]:
    """Two samples of one task, and one of another, in another order than that of a rollout."""
    return [
        trajectory(1, 0, reward=-0.5, turns=1, stop_reason="truncated", versions=["4", "4"]),
        trajectory(0, 1, versions=["3", "3", "3", "4"]),
        trajectory(0, 0, reward=0.0, turns=1, versions=["3", "3"]),
    ]


def made_by(trainer: str, path: Path) -> Any:
    """What the trainer's loader makes of a file."""
    if not SOURCES:
        pytest.skip("KUBEROLL_TEST_TRAINERS names no directory with sources of trainers")
    script = Path(__file__).parent / "trainer_loaders.py"
    path_of_modules = os.pathsep.join(str(Path(SOURCES) / place) for place in PLACES)
    done = subprocess.run(
        [sys.executable, str(script), trainer, str(path)],
        env={**os.environ, "PYTHONPATH": path_of_modules, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_slimes_file_has_the_samples_of_a_group_together(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    exported = export(tmp_path, "slime", *records())
    assert exported.path.name == "run.slime.pt"
    # Python's own types only: nothing of KubeRoll is needed to read it.
    document = torch.load(exported.path, weights_only=True)
    assert [(sample["group_index"], sample["index"], sample["reward"]) for sample in document["samples"]] == [
        (0, 0, 0.0), (0, 1, 1.0), (1, 2, -0.5),
    ]  # fmt: skip
    sample = document["samples"][1]
    assert (sample["tokens"], sample["loss_mask"]) == (IDS, MASK[4:])
    assert sample["rollout_log_probs"] == pytest.approx(LOGPROBS[4:])
    assert (sample["label"], sample["response"]) == ("42", "move 1board 1move 2")
    assert sample["prompt"] == [{"role": "system", "content": "Play."}, {"role": "user", "content": "Board"}]
    with pytest.raises(ExportError, match=r"slime comes in files that end in \.pt"):
        export(tmp_path, "slime", trajectory(), file="run.parquet")
    with pytest.raises(ExportError, match="exists already"):
        export(tmp_path, "slime", trajectory())
    with pytest.raises(ExportError, match="no trajectory is selected"):
        export_run(run_of(tmp_path / "none", shards=1), to="slime", output=tmp_path / "none.pt")
    assert not (tmp_path / "none.pt").exists()


def test_slimes_own_loader(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    found = made_by("slime", export(tmp_path, "slime", *records()).path)
    assert found["groups"] == [[0, 0, 0], [0, 1, 1], [1, 2, 2]]
    assert found["status"] == ["completed", "completed", "truncated"]
    assert found["source"] == ["puzzle"] * 3
    assert found["lengths"] == [[2, 2], [7, 4], [2, 2]]
    assert found["versions"] == [["3"], ["3", "3"], ["4"]]
    assert found["reward"] == [0.0, 1.0, -0.5]
    assert (found["tokens"][1], found["loss_masks"][1]) == (IDS, MASK[4:])
    assert found["rollout_log_probs"][1] == pytest.approx(LOGPROBS[4:])


def test_slimes_own_loader_reads_the_paths_of_a_trajectory_as_one_rollout(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    found = made_by("slime", export(tmp_path, "slime", played(FORKED), trajectory(6)).path)
    assert found["groups"] == [[5, 0, 0], [5, 1, 0], [6, 2, 1]]
    assert (found["tokens"][1], found["loss_masks"][1]) == ([1, 2, 9, 5], [1])


def test_skyrls_own_loader(tmp_path: Path) -> None:
    found = made_by("skyrl", export(tmp_path, "skyrl", *records()).path)
    row = next(row for row in found["sft"] if len(row["input_ids"]) == len(IDS))
    assert row == {"input_ids": IDS, "num_actions": 7, "loss_mask": MASK[4:]}
    output = found["output"]
    place = output["rewards"].index(1.0)
    assert output["prompt_token_ids"][place] + output["response_ids"][place] == IDS
    assert output["rollout_logprobs"][place] == pytest.approx(LOGPROBS[4:])
    assert sorted(output["stop_reasons"]) == ["length", "stop", "stop"]


def test_prime_rls_own_batches(tmp_path: Path) -> None:
    found = made_by("prime_rl", export(tmp_path, "prime-rl", *records()).path)
    batch = next(batch for batch in found if len(batch["input_ids"]) == len(IDS))
    assert (batch["input_ids"], batch["loss_mask"]) == (IDS, [bool(own) for own in MASK])
    assert batch["logprobs"] == pytest.approx(LOGPROBS)


def test_areals_own_check_and_batch(tmp_path: Path) -> None:
    found = made_by("areal", export(tmp_path, "areal", *records()).path)
    place = found["rewards"].index(1.0)
    assert (found["input_ids"][place], found["loss_mask"][place]) == (IDS, MASK)
    assert found["logprobs"][place] == pytest.approx(LOGPROBS)
    assert found["versions"][place] == [-1] * 4 + [3, 3, -1, -1, -1, 3, 4]
    assert sum(map(sum, found["attention_mask"])) == len(IDS) + 2 * 6


@pytest.mark.parametrize(
    ("to", "ids", "mask"),
    [("skyrl", "input_ids", "loss_mask"), ("areal", "input_ids", "loss_mask"), ("prime-rl", "token_ids", "mask")],
)
def test_columns_are_over_the_whole_sequence(tmp_path: Path, to: str, ids: str, mask: str) -> None:
    exported = export(tmp_path, to, trajectory(), trajectory(1, logprobs=False), file="o.jsonl")
    row, unknown = sorted(
        map(json.loads, exported.path.read_text().splitlines()), key=lambda row: str(row.get("task_index")) + str(row)
    )
    if row.get("logprobs", row.get("rollout_logprobs")) is None:
        row, unknown = unknown, row
    assert (row[ids], [int(own) for own in row[mask]]) == (IDS, MASK)
    assert unknown.get("logprobs", unknown.get("rollout_logprobs")) is None
    # Without numbers of versions there are none.
    assert (row.get("versions"), row.get("model_version")) == (None, None)


def test_prime_rls_messages_have_calls_and_tools(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    exported = export(tmp_path, "prime-rl", calling())
    rows = datasets.load_dataset(
        "parquet", data_files=str(exported.path), split="train", cache_dir=str(tmp_path / "cache")
    )
    (said,) = (message for message in rows[0]["messages"] if message["tool_calls"])
    assert said["tool_calls"][0]["function"] == {"name": "price", "arguments": {"item": "pér"}}
    assert rows[0]["tools"][0]["function"]["name"] == "price"
