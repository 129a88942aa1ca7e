"""Environments that crash and hang beside others, in one run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from kuberoll_workers.output import records
from kuberoll_workers.output.storage import DirectoryStorage
from tests.environments.episodic import events_in, unclosed
from tests.environments.faulty import faulty_episodes
from tests.local.mixed_job import NOTED, REPEATS, ROWS, mixed_job
from tests.local.support import run_to_end, trajectories


@pytest.mark.processes
def test_bad_environments_harm_themselves_only(tmp_path: Path) -> None:
    output = tmp_path / "out"
    code, text = run_to_end(mixed_job(tmp_path, faults=True), "--output", output, "--metrics-port", "0")
    assert code == 0, text
    finished = trajectories(output)
    failed = list(records.failures(DirectoryStorage(output)))
    ended = Counter(record.task_name for record in finished) + Counter(record.task_name for record in failed)
    assert len(ended) == 8
    assert set(ended.values()) == {ROWS * REPEATS}

    faults = {name: faulty_episodes(tmp_path / name) for name in ("crashing", "hanging")}
    assert all(faults.values())
    for name, cause in (("crashing", "exit code 3"), ("hanging", "took longer than stepTimeoutSeconds")):
        hit = [failure for failure in failed if failure.task_name == name]
        assert {f"{failure.task_index}-{failure.rollout_index}-{failure.attempt}" for failure in hit} == faults[name]
        assert {(failure.stage, failure.kind) for failure in hit} == {("environment", hit[0].kind)}
        assert all(cause in failure.cause for failure in hit)
    assert {failure.task_name for failure in failed} == faults.keys()

    for name in NOTED:
        events = events_in(tmp_path / name)
        assert {event.method for event in events} >= {"reset", "close"}
        assert unclosed(events, anywhere=True) == []
