"""Warnings of lines that cannot be read: each once, and not without end."""

from __future__ import annotations

from pathlib import Path

import pytest

from kuberoll_workers.data.record import RecordError
from kuberoll_workers.output import records, unreadable
from kuberoll_workers.output.storage import DirectoryStorage


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unreadable, "_warned", set())


def test_a_hundred_lines_are_named_and_the_rest_is_not(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        for number in range(150):
            unreadable.warn_unreadable(RecordError(f"x.jsonl:{number}: torn"), trajectory=True)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 101
    assert messages[0] == (
        "x.jsonl:0: torn; the line stays where it is: its trajectory counts as not done, and is run again "
        "when the run is resumed"
    )
    assert messages[99].startswith("x.jsonl:99: torn")
    assert messages[100] == "more than 100 stored lines cannot be read; further ones are left out silently"


def test_what_is_lost_is_told(caplog: pytest.LogCaptureFixture) -> None:
    unreadable.warn_unreadable(RecordError("x.jsonl:1: torn"), trajectory=False)
    assert caplog.messages == ["x.jsonl:1: torn; the line stays where it is: left out"]
    assert unreadable.file_of("shard-00003") == "unreadable-00003.jsonl"


def test_an_unreadable_failure_is_left_out_and_no_trajectory_is_run_again_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (records.FAILURES, records.DROPPED):
        (tmp_path / f"{name}.jsonl").write_bytes(b"{}\n")
    storage = DirectoryStorage(tmp_path)
    assert [*records.failures(storage), *records.dropped(storage)] == []
    assert [message.rpartition(": ")[2] for message in caplog.messages] == ["left out", "left out"]
