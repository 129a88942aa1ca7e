"""What a run of the tests says at its end.

CI keeps only the last kilobytes of the output, or those around pytest's summary: what failed comes first and last
there, with its reason, and tests that are skipped for one reason take one line, however many they are.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest

LONGEST_REASON = 400
"""Characters of a reason that are shown; where a test failed, its traceback above has them all."""

MOST_AT_THE_END = 15
"""Failures that are repeated at the end."""

# Reports of phases; those of setup and teardown that passed have no name.
_TIMED = ("", "passed", "failed", "error", "xfailed", "rerun")

# pytest-xdist adds the group of a test to its id; pytest would not find it by that.
_GROUP = re.compile(r"@[^\]]*$")


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Write what failed and what was skipped, before and after what others write (the slowest tests)."""
    repeated = list(repetitions(terminalreporter.stats.get("rerun", [])))
    failed = list(failures(terminalreporter.stats))
    skipped = list(skips(terminalreporter.stats.get("skipped", [])))
    _write(terminalreporter, "failed at first", repeated)
    _write(terminalreporter, "failed", failed)
    _write(terminalreporter, "skipped", skipped)
    yield
    _write(terminalreporter, "seconds by directory", list(seconds_by_directory(terminalreporter.stats)))
    _write(terminalreporter, "failed at first", repeated)
    more = len(failed) - MOST_AT_THE_END
    _write(terminalreporter, "failed", failed[:MOST_AT_THE_END] + [f"and {more} more, above"] * (more > 0))


def failures(stats: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """A line for each failed test: its place and the reason."""
    for kind, reports in (("FAILED", stats.get("failed", [])), ("ERROR", stats.get("error", []))):
        for report in reports:
            yield f"{kind} {_place(report)} - {_reason(report)}"


def repetitions(reports: Iterable[Any]) -> Iterator[str]:
    """A line for each failure whose test was repeated (`second_chance.py`): its place and the reason."""
    for report in reports:
        yield f"RERUN {_place(report)} - {_reason(report)}"


def seconds_by_directory(stats: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """A line for each directory of tests: its seconds in all processes, and its number of tests; the longest first."""
    seconds: dict[str, float] = defaultdict(float)
    tests: Counter[str] = Counter()
    for report in (each for kind in _TIMED for each in stats.get(kind, [])):
        directory = _place(report).partition("::")[0].removeprefix("tests/").partition("/")[0]
        # The report of a module that could not be imported has none.
        seconds[directory] += getattr(report, "duration", 0.0)
        tests[directory] += report.when == "call"
    for directory, taken in sorted(seconds.items(), key=lambda item: -item[1]):
        if taken >= 1:
            yield f"{taken:7.0f} s {tests[directory]:6} {directory}"


def skips(reports: Iterable[Any]) -> Iterator[str]:
    """A line for each reason to skip tests, with their number, the most frequent first."""
    for reason, count in Counter(_reason(report) for report in reports).most_common():
        yield f"SKIPPED [{count}] {reason}"


def _place(report: Any) -> str:
    return _GROUP.sub("", report.nodeid)


def _reason(report: Any) -> str:
    found = report.longrepr
    if isinstance(found, tuple):
        text = str(found[2]).removeprefix("Skipped: ")
    elif (crash := getattr(found, "reprcrash", None)) is not None:
        text = crash.message
    else:
        text = str(found)
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_REASON else text[:LONGEST_REASON] + " …"


def _write(reporter: pytest.TerminalReporter, title: str, lines: list[str]) -> None:
    if lines:
        reporter.section(title)
        for line in lines:
            reporter.write_line(line)
