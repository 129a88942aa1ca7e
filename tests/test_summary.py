"""The end of a run's output, which is all that CI keeps of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.second_chance import MOST
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


UNSTEADY = """
import signal
import pytest

attempts = []

@pytest.fixture(scope="module")
def engine():
    attempts.append("engine")
    if attempts.count("engine") == 1:
        raise RuntimeError("no memory")
    yield "engine"
    assert attempts.count("second") == 2

@pytest.mark.engine
def test_first(engine):
    assert attempts == ["engine", "engine"]

@pytest.mark.processes
@pytest.mark.timeout(100)
def test_second(engine):
    attempts.append("second")
    if attempts.count("second") == 1:
        signal.setitimer(signal.ITIMER_REAL, 0)
        pytest.fail("stopped by the clock")
    assert signal.getitimer(signal.ITIMER_REAL)[0] > 0

def test_of_code():
    attempts.append("code")
    assert attempts.count("code") == 2

@pytest.mark.ray
@pytest.mark.parametrize("number", range(6))
def test_never(number):
    raise RuntimeError(number)
"""

CONFTEST = """
from tests import second_chance, summary

def pytest_addoption(parser):
    second_chance.add_option(parser)

def pytest_configure(config):
    config.pluginmanager.register(second_chance)
    config.pluginmanager.register(summary)

def pytest_collection_modifyitems(config, items):
    second_chance.offer(config, items)
"""


def sections_of(directory: Path, *options: str) -> list[tuple[str, list[str]]]:
    """Titles and lines of what pytest prints about the tests of a directory, after their tracebacks."""
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(directory), "--durations=1", *options]
    names = ["xdist.plugin", "pytest_timeout", "pytest_rerunfailures", "no:cacheprovider"]
    plugins = [word for name in names for word in ("-p", name)]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [*command, *plugins, "-n1", "--dist=loadgroup", "--tb=line", "-rN", "-W", "ignore"],
        cwd=directory, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    found = re.findall(r"^=+ (.*?) =+\n(?:([^=].*?)(?=^=))?", done.stdout, flags=re.MULTILINE | re.DOTALL)
    titles = [title for title, _ in found]
    start = min((titles.index(title) for title in ("failed at first", "failed") if title in titles), default=None)
    assert start is not None, done.stdout + done.stderr
    return [(title, text.splitlines()) for title, text in found[start:]]


@pytest.mark.slow
def test_what_failed_comes_first_and_last_and_each_reason_to_skip_once(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_these.py").write_text(TESTS)
    failed = [
        f"FAILED test_these.py::test_failure[me@home] - RuntimeError: {'x' * (LONGEST_REASON - 14)} …",
        "ERROR test_these.py::test_error - ValueError: two lines",
    ]
    first, skipped, (slowest, _), last, _ = sections_of(tmp_path)
    assert first == last == ("failed", failed)
    assert skipped == ("skipped", ["SKIPPED [30] nothing here", "SKIPPED [1] takes long"])
    assert slowest == "slowest 1 durations"


@pytest.mark.slow
def test_what_starts_something_has_a_second_chance_which_the_summary_names(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_these.py").write_text(UNSTEADY)
    sections = sections_of(tmp_path, "--second-chance")
    counts = sections[-1][0]
    repeated = [
        "RERUN test_these.py::test_first - RuntimeError: no memory",
        "RERUN test_these.py::test_second - Failed: stopped by the clock",
        *(f"RERUN test_these.py::test_never[{number}] - RuntimeError: {number}" for number in range(MOST - 2)),
    ]
    failed = [line.partition(" - ")[0] for line in dict(sections)["failed"]]
    assert failed == [
        "FAILED test_these.py::test_of_code",
        *(f"FAILED test_these.py::test_never[{number}]" for number in range(6)),
    ]
    titles = [title for title, _ in sections]
    assert titles.count("failed at first") == titles.count("failed") == 2
    assert dict(sections)["failed at first"] == repeated
    assert "7 failed, 2 passed" in counts
    # Without the option nothing is repeated.
    assert "failed at first" not in [title for title, _ in sections_of(tmp_path)]
