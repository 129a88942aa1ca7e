"""A Prometheus' HTTP API, the dashboards as they are installed, and pages to scrape."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).parents[2]
DASHBOARDS = ROOT / "charts" / "kuberoll" / "files" / "dashboards"
PATIENCE_SECONDS = 240

_NAME = re.compile(r"\b(?:kuberoll|ray)_[a-zA-Z0-9_]+")
_LEGEND_LABEL = re.compile(r"\{\{(\w+)\}\}")


class Api:
    """What a Prometheus answers."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url = url
        self._http = http

    async def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer.

        Raises:
            QueryFailed: In Prometheus' own words.
        """
        async with self._http.get(f"{self.url}/api/v1/{path}", params=parameters) as answer:
            body = json.loads(await answer.text())
        if body["status"] != "success":
            raise QueryFailed(f"{body['error']} in {parameters}")
        return body["data"]

    async def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series now."""
        data = await self.get("query", query=expression)
        return [(item["metric"], float(item["value"][1])) for item in data["result"]]

    async def number(self, expression: str) -> float:
        """The one value; NaN: none."""
        found = await self.query(expression)
        return found[0][1] if found else math.nan


class QueryFailed(Exception):
    """Prometheus refused it."""


async def until(holds: Callable[[], Awaitable[bool]], *tasks: asyncio.Task[Any]) -> None:
    """Ask until it holds; none of the tasks may fail meanwhile."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await holds():
            for task in tasks:
                if task.done():
                    task.result()
            # Prometheus has nothing that tells when a scrape is done.
            await asyncio.sleep(0.1)


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """One query of a panel, its variables still in it."""

    dashboard: str
    panel: str
    legend: str
    expression: str

    def __str__(self) -> str:
        return f"{self.dashboard}: {self.panel}: {self.legend}"

    @property
    def labels(self) -> set[str]:
        """Those that its legend shows."""
        return set(_LEGEND_LABEL.findall(self.legend))


def panel_queries() -> list[PanelQuery]:
    """All of them, as they are installed."""
    found = []
    for path in sorted(DASHBOARDS.glob("*.json")):
        for panel in _panels(json.loads(path.read_text())):
            found += [
                PanelQuery(path.stem, panel["title"], target["legendFormat"], target["expr"])
                for target in panel.get("targets", ())
            ]
    return found


def variable_queries() -> dict[str, str]:
    """The queries of the dashboards' variables, by dashboard and name."""
    found = {}
    for path in sorted(DASHBOARDS.glob("*.json")):
        for item in json.loads(path.read_text())["templating"]["list"]:
            if item["type"] == "query":
                query = item["query"]
                found[f"{path.stem}: {item['name']}"] = query if isinstance(query, str) else query["query"]
    return found


def _panels(item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in item.get("panels") or ():
        if panel["type"] == "row":
            yield from _panels(panel)
        else:
            yield panel


def filled(expression: str, *, interval: str = "30s", span: str = "5m") -> str:
    """An expression with Grafana's variables replaced: everything, within these ranges."""
    for name, value in {
        "$namespace": ".*",
        "$job": ".*",
        "$environment": ".*",
        "$__rate_interval": interval,
        "$__range": span,
    }.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression


def metric_names(expression: str) -> set[str]:
    """The metrics that it asks for, as they are declared: without the suffixes of a histogram's series."""
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in _NAME.findall(expression)}


@contextmanager
def pages(texts: list[str]) -> Iterator[int]:
    """Serve one text after the other under /metrics, then the last one for ever; the port."""
    left = list(texts)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with lock:
                text = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
