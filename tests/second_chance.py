"""A second chance for tests that start real processes, engines or containers: `make test` gives it, once for each.

Such a test may fail because the machine was busy, which says nothing about the code; a test that starts nothing is
never repeated. What failed at first is in the summary, with its reason and its traceback.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

MARKS = frozenset({"browser", "cluster", "engine", "images", "processes", "ray"})
"""Markers of tests that get it."""

MOST = 4
"""Tests of one run that get it. Where more fail, the code is at fault, and nobody should wait twice as long for it."""


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--second-chance",
        action="store_true",
        help=f"Repeat up to {MOST} failed tests that start real processes, engines or containers, once each.",
    )


def offer(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Let pytest-rerunfailures repeat those of these tests that may be."""
    if not config.getoption("--second-chance"):
        return
    config.option.max_suite_reruns = MOST
    config.option.rerun_show_tracebacks = True
    for item in items:
        if MARKS.intersection(mark.name for mark in item.iter_markers()):
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give the repetition its own time: pytest-timeout starts its clock before the first attempt, and only then."""
    if getattr(item, "execution_count", 1) > 1:
        from pytest_timeout import _get_item_settings

        settings = _get_item_settings(item)
        if settings.timeout:
            item.config.hook.pytest_timeout_cancel_timer(item=item)
            item.config.hook.pytest_timeout_set_timer(item=item, settings=settings)
