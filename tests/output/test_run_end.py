"""The end of a run: what can be made of it is made, whatever else can not."""

from __future__ import annotations

from pathlib import Path

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.data.record import AnyRecord, encode_line
from kuberoll_workers.output.run_directory import AGGREGATES
from kuberoll_workers.output.run_files import RunFiles
from kuberoll_workers.run_end import RunEnd, end_run
from tests.output.support import dropped, failure, record
from tests.pods.test_finish import job


def ended(directory: Path, *lines: AnyRecord | bytes, trajectories: int = 2, wanted: int | None = None) -> RunEnd:
    data = [line if isinstance(line, bytes) else encode_line(line) for line in lines]
    (directory / "shard-00000.jsonl").write_bytes(b"".join(data))
    document = job() if wanted is None else job(groups={"wanted": wanted, "oversample": 1})
    made = RolloutJob.model_validate(document)
    notes: list[str] = []
    end = end_run(made, RunFiles(str(directory)), trajectories=trajectories, note=notes.append)
    assert notes == []
    return end


def test_a_complete_run(tmp_path: Path) -> None:
    end = ended(tmp_path, record(0), record(0, 1))
    assert (end.problem(), end.missing, end.failed_steps) == (None, 0, {})
    assert [Path(file).name for file in end.files] == [AGGREGATES, "task_metrics.jsonl", "report.html"]
    assert set(end.seconds) == {"aggregation", "report"}


def test_trajectories_are_missing(tmp_path: Path) -> None:
    (tmp_path / "failures.jsonl").write_bytes(encode_line(failure(1)))
    (tmp_path / "dropped.jsonl").write_bytes(encode_line(dropped(2)) + encode_line(dropped(3, reason="filtered")))
    end = ended(tmp_path, record(0), trajectories=6)
    assert end.problem() == "3 of 6 trajectories are missing: 1 finished, 1 failed, 2 dropped"
    wanted = ended(tmp_path, record(0), trajectories=60, wanted=3).problem() or ""
    assert wanted.startswith("only 1 trajectories are kept, rollout.groups.wanted asks for 3 groups")


def test_what_the_report_cannot_show_costs_the_numbers_nothing(tmp_path: Path) -> None:
    # An integer that no page can hold, in a line that KubeRoll would not write.
    odd = encode_line(record(0)).replace(b'"state":null', b'"state":' + str(2**70).encode())
    end = ended(tmp_path, odd, record(0, 1))
    assert list(end.failed_steps) == ["report"]
    assert end.aggregates is not None
    assert end.aggregates.trajectories == 2
    assert (tmp_path / AGGREGATES).exists()


def test_without_numbers_there_is_no_report(tmp_path: Path) -> None:
    end = ended(tmp_path, record(0), record(0, 1, task_name="other"))
    assert list(end.failed_steps) == ["aggregation", "report"]
    assert "these are trajectories of several runs" in str(end.failed_steps["report"])
    assert (end.aggregates, end.missing, end.problem(), end.files) == (None, 2, None, [])
