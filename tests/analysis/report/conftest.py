"""A browser for the pages: Chromium of the machine (`KUBEROLL_CHROMIUM`, or on the path), driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kuberoll_workers.analysis.report.page import render
from kuberoll_workers.output.precedence import EndedRecord
from tests.analysis.report.runs import report_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page


@dataclass
class Opened:
    """A page, and what it must not do: say errors, ask for anything."""

    page: Page
    faults: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


Open = Callable[..., Opened]


# Of one module: while Playwright runs, no other test can start an event loop.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    named = os.environ.get("KUBEROLL_CHROMIUM")
    found = named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium: install Debian's package chromium, or name one in KUBEROLL_CHROMIUM")
    with playwright.sync_playwright() as driver:
        # Chromium's sandbox does not work for root.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        started = driver.chromium.launch(executable_path=found, args=arguments)
        yield started
        started.close()


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Render records, or take a page, and open it; at the end it has said no error and asked for nothing."""
    contexts = []
    pages: list[Opened] = []

    def show(
        records: Iterable[EndedRecord] = (),
        *,
        report: dict[str, Any] | None = None,
        page: bytes | None = None,
        **options: Any,
    ) -> Opened:
        place = tmp_path / f"report-{len(pages)}.html"
        place.write_bytes(page or render(report_of(records, **(report or {}))))
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        made = Opened(context.new_page())
        pages.append(made)

        def said(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                made.faults.append(message.text)

        made.page.on("console", said)
        made.page.on("pageerror", lambda error: made.faults.append(str(error)))
        made.page.on("request", lambda request: made.requests.append(request.url))
        made.page.goto(place.as_uri())
        made.page.wait_for_selector("html[data-ready]", state="attached")
        return made

    yield show
    for made in pages:
        assert made.faults == []
        assert [url for url in made.requests if "/report-" not in url] == []
    for context in contexts:
        context.close()
