"""The end of a run's output, which is all that CI keeps of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.summary import LONGEST_REASON

ROOT = Path(__file__).resolve().parent.parent

TESTS = """
import pytest

@pytest.mark.parametrize("number", range(30))
def test_needs(number):
    pytest.skip("nothing here")

@pytest.mark.skip(reason="takes long")
def test_long(): ...

@pytest.fixture
def missing():
    raise ValueError("two\\nlines")

def test_error(missing): ...

@pytest.mark.xdist_group("these")
@pytest.mark.parametrize("address", ["me@home"])
def test_failure(address):
    raise RuntimeError("x" * 1000)
"""


@pytest.mark.slow
def test_what_failed_comes_first_and_last_and_each_reason_to_skip_once(tmp_path: Path) -> None:
    (tmp_path / "test_these.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(tmp_path), "--tb=no", "--durations=1"]
    plugins = ["-p", "tests.summary", "-p", "xdist.plugin", "-p", "no:cacheprovider", "-n1", "--dist=loadgroup", "-rN"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    done = subprocess.run([*command, *plugins], cwd=tmp_path, env=environment, capture_output=True, text=True)
    sections = re.findall(r"^=+ (.*?) =+\n([^=].*?)(?=^=)", done.stdout, flags=re.MULTILINE | re.DOTALL)
    assert [title for title, _ in sections[1:]] == ["failed", "skipped", "slowest 1 durations", "failed"], done.stdout
    (_, failed), (_, skipped), _, (_, last) = sections[1:]
    assert failed.splitlines() == [
        f"FAILED test_these.py::test_failure[me@home] - RuntimeError: {'x' * (LONGEST_REASON - 14)} …",
        "ERROR test_these.py::test_error - ValueError: two lines",
    ]
    assert last == failed
    assert skipped.splitlines() == ["SKIPPED [30] nothing here", "SKIPPED [1] takes long"]
