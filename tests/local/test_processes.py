"""Child processes of a run."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from kuberoll_workers.local.processes import Child


async def test_children_keep_compiled_modules_whatever_the_user_s_shell_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reporting.py").write_text("import json, sys; print(json.dumps({'kept': not sys.dont_write_bytecode}))")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    child = await Child.start("reporting", [], log=tmp_path / "log", environment={"PYTHONPATH": str(tmp_path)})
    assert [report async for report in child.reports()] == [{"kept": True}]
    assert await child.wait() == 0


async def test_a_child_that_ended_before_its_signal_has_its_exit_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if sys.version_info < (3, 12):
        # The way of later versions to learn of the end of a child.
        usual, watcher = asyncio.get_child_watcher(), asyncio.PidfdChildWatcher()
        watcher.attach_loop(asyncio.get_running_loop())
        asyncio.set_child_watcher(watcher)
    try:
        (tmp_path / "ending.py").write_text("raise SystemExit(3)")
        child = await Child.start("ending", [], log=tmp_path / "log", environment={"PYTHONPATH": str(tmp_path)})
        # It has ended, and the event loop has not heard of it.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222
        child.signal(signal.SIGTERM)
        assert await child.wait() == 3
        child.signal(signal.SIGTERM)
    finally:
        if sys.version_info < (3, 12):
            asyncio.set_child_watcher(usual)
    assert not caplog.records
