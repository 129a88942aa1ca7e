"""The guide's commands print what the guide shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kuberoll_workers.authoring import CHECKS
from kuberoll_workers.authoring.subject import Subject

GUIDE = (Path(__file__).parents[2] / "docs" / "tutorials" / "writing-environments.md").read_text()


def lines_of(text: str) -> list[str]:
    """Lines without progress, and without the numbers that a machine's speed decides."""
    timed = ("checks:", "metrics:", "time:", "per trajectory:")
    return [
        # Which losses it names depends on the machine, too.
        "schedule:"
        if line.startswith("schedule:")
        else re.sub(r"[\d.]+", "N", line)
        if line.startswith(timed)
        else line.rstrip()
        for line in text.rstrip("\n").split("\n")
        if not re.match(r"\d+/\d+ trajectories", line)
    ]


@pytest.mark.processes
def test_the_commands_print_what_the_guide_shows(tmp_path: Path) -> None:
    blocks = re.findall(r"^```\n(\$ .*?)^```$", GUIDE, flags=re.DOTALL | re.MULTILINE)
    parts = [part for block in blocks for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    assert len(parts) == 8
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for part in parts:
        command, _, expected = part.partition("\n")
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env={**os.environ, "PATH": path, "COLUMNS": "120"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
            check=False,
        )
        assert lines_of(done.stdout) == lines_of(expected), command


def test_the_guide_explains_every_check() -> None:
    assert re.findall(r"^\| `(\w+)` \|", GUIDE, flags=re.MULTILINE) == list(CHECKS)


def test_the_cases_of_the_guide_can_be_declared() -> None:
    declared, _ = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)
    scope: dict[str, type] = {"__name__": "guide"}  # type: ignore[dict-item]
    exec(declared, scope)
    made = type("Made", (scope["GuessNumber"],), {"__init__": lambda self, config: None})
    cases = Subject.of_class(made).cases()
    assert [case.expected for case in cases] == ["1", "0", "0.5 to 1"]
