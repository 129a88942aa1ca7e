"""The end of a run: what can be made of it is made, whatever else can not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kuberoll_api import plugins
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.commands.aggregate import aggregate as aggregate_command
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


def cut_by_time() -> tuple[list[AnyRecord], bytes]:
    """Twelve pairs, of each of which one has ended in its first turn and one was cut in its seventh."""
    kept: list[AnyRecord] = [record(task) for task in range(12)]
    cut = [failure(task, 1, kind="operator", reason="TrajectoryDeadline", turn_count=6) for task in range(12)]
    return kept, b"".join(map(encode_line, cut))


def test_a_run_that_lost_its_long_trajectories_says_so(tmp_path: Path) -> None:
    kept, cut = cut_by_time()
    (tmp_path / "failures.jsonl").write_bytes(cut)
    (line,) = ended(tmp_path, *kept, trajectories=24).summary
    assert line.startswith("env: 12 of 24 trajectories were removed, and longer ones more often (p < 0.001)")
    done = CliRunner().invoke(aggregate_command, [str(tmp_path)])
    assert line in done.stdout


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


OTHERS = """
class Counting:
    after = ("report",)

    def __init__(self, run):
        self.run, self.records = run, 0

    @staticmethod
    def is_wanted(job):
        return job.metadata.name != "unwanted"

    def offer(self, record):
        self.records += 1

    def make(self, aggregates):
        page = self.run.files.location + "/report.html"
        text = f"{self.records} of {aggregates.trajectories}, {len(open(page).read()) > 1000}"
        return EndingResult(files=[self.run.files.write("count.txt", text.encode())], summary=[f"counted {text}"])


class Earlier(Counting):
    after = ("later",)

    def make(self, aggregates):
        return EndingResult()


class Later(Earlier):
    after = ("earlier",)


class Raising(Counting):
    def offer(self, record):
        raise KeyError("of the plug-in")
"""


def others(directory: Path, monkeypatch: pytest.MonkeyPatch, **classes: str) -> Path:
    """A directory for a run, beside a package that registers these endings."""
    package = directory / "package"
    metadata = package / "counts-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: counts\nVersion: 1.0\n")
    named = "\n".join(f"{name} = {entrypoint}" for name, entrypoint in classes.items())
    (metadata / "entry_points.txt").write_text(f"[{plugins.ENDINGS}]\n{named}\n")
    (package / "counts_of_runs.py").write_text(f"from kuberoll_workers.analysis.endings import EndingResult\n{OTHERS}")
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.delitem(sys.modules, "counts_of_runs", raising=False)
    run = directory / "run"
    run.mkdir()
    return run


def test_endings_of_other_packages_are_made_and_cost_no_other_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classes = {"a_count": "counts_of_runs:Counting", "absent": "no_such_module:A", "bad": "counts_of_runs:Raising"}
    run = others(tmp_path, monkeypatch, **classes)
    end = ended(run, record(0), record(0, 1))
    assert {name: type(error) for name, error in end.failed_steps.items()} == {
        "absent": ModuleNotFoundError,
        "bad": KeyError,
    }
    # It is made after the report, which its name would not give.
    assert (run / "count.txt").read_text() == "2 of 2, True"
    assert "counted 2 of 2, True" in end.summary
    assert [Path(file).name for file in end.files][-2:] == ["report.html", "count.txt"]


def test_endings_that_wait_for_each_other_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = others(tmp_path, monkeypatch, earlier="counts_of_runs:Earlier", later="counts_of_runs:Later")
    end = ended(run, record(0), record(0, 1))
    assert end.failed_steps == {}
    assert {"earlier", "later", "report"} < set(end.seconds)


def test_a_run_without_endings_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a checkout that was not installed again after a change."""
    (tmp_path / "shard-00000.jsonl").write_bytes(encode_line(record(0)) + encode_line(record(0, 1)))
    monkeypatch.setattr(plugins, "installed", lambda group: {})
    notes: list[str] = []
    end = end_run(RolloutJob.model_validate(job()), RunFiles(str(tmp_path)), trajectories=2, note=notes.append)
    assert [Path(file).name for file in end.files] == [AGGREGATES, "task_metrics.jsonl"]
    [note] = notes
    assert "there will be no report" in note
    assert "install KubeRoll again" in note
