"""Child processes of a run."""

from __future__ import annotations

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
