"""The report as a self-contained HTML page: no network, no other files, no framework."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import zlib
from collections.abc import Iterator, Sequence
from importlib.resources import files
from string import Template
from typing import Any

import orjson

from kuberoll_workers.analysis.report.data import ReportData
from kuberoll_workers.analysis.report.trajectory_sample import ReadableTrajectory
from kuberoll_workers.data.stop_reasons import ENDINGS, OUTCOMES, look

_SCRIPTS = ("format.js", "charts.js", "trajectories.js", "tokens.js", "detail.js", "browser.js", "page.js")
_CHUNK = 64
_CHUNK_BYTES = 512 << 10


def render(data: ReportData) -> bytes:
    """Render the report of a run."""
    title = str(data.head["job"] or data.head["location"])
    document = {"head": data.head, "numbers": data.numbers}
    return assemble("report", title, document, data.browsed, offered=data.offered)


def assemble(
    name: str,
    title: str,
    document: dict[str, Any],
    browsed: Sequence[ReadableTrajectory],
    *,
    offered: int,
    runs: Sequence[str] = (),
) -> bytes:
    """A self-contained page with trajectories to read.

    No data of the run becomes markup or code: numbers are embedded as JSON, texts compressed, and the script inserts
    them as text. The page's Content-Security-Policy allows only its own script and style, and no requests.

    Args:
        name: Name of the page, of its sections' template, and of its script.
        document: The script's data.
        offered: Number of trajectories from which the browsed ones were chosen.
        runs: Run of each browsed trajectory, a letter; empty if they are all of one.
    """
    assets = files(__package__).joinpath("assets")
    style = assets.joinpath("report.css").read_text("utf-8")
    script = "\n".join(assets.joinpath(part).read_text("utf-8") for part in (*_SCRIPTS, f"{name}.js"))
    chunks, starts = _chunks(browsed)
    document = {
        **document,
        "endings": {
            name: {"title": ending.title, "kind": ending.kind, "look": look(name)} for name, ending in ENDINGS.items()
        },
        "browsed": {"count": len(browsed), "offered": offered, "starts": starts},
    }
    page = Template(assets.joinpath("page.html").read_text("utf-8")).substitute(
        name=name,
        main=Template(assets.joinpath(f"{name}.html").read_text("utf-8")).substitute(
            trajectories=assets.joinpath("trajectories.html").read_text("utf-8")
        ),
        title=html.escape(title),
        policy=f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'",
        style=style,
        script=script,
        data=_inert(document),
        index=_packed(orjson.dumps({**_index(browsed), **({"run": list(runs)} if runs else {})})),
        chunks="\n".join(
            f'<script type="text/plain" id="chunk-{number}">{chunk}</script>' for number, chunk in enumerate(chunks)
        ),
    )
    return page.encode()


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _inert(value: Any) -> str:
    """JSON that can neither end a script element nor start a comment in one."""
    text = orjson.dumps(value).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _packed(data: bytes) -> str:
    return base64.b64encode(gzip.compress(data, mtime=0)).decode()


def _index(browsed: Sequence[ReadableTrajectory]) -> dict[str, Any]:
    """Rows by column, which compresses well; repeated strings are numbers into a list."""
    environments = sorted({item.row.environment for item in browsed})
    numbers = {name: number for number, name in enumerate(environments)}
    rows = [item.row for item in browsed]
    return {
        "environments": environments,
        "outcomes": OUTCOMES,
        "task": [row.key.task_index for row in rows],
        "rollout": [row.key.rollout_index for row in rows],
        "environment": [numbers[row.environment] for row in rows],
        "outcome": [OUTCOMES.index(row.outcome) for row in rows],
        "reward": [row.reward for row in rows],
        "turns": [row.turns for row in rows],
        "prompt": [row.prompt_tokens for row in rows],
        "generated": [row.generated_tokens for row in rows],
        "observed": [row.environment_tokens for row in rows],
        "seconds": [_seconds(row.generation_seconds, row.environment_seconds) for row in rows],
    }


def _seconds(*parts: float | None) -> float | None:
    known = [part for part in parts if part is not None]
    return round(sum(known), 6) if known else None


def _chunks(browsed: Sequence[ReadableTrajectory]) -> tuple[list[str], list[int]]:
    """Texts in chunks that a browser opens one at a time, and the number of each chunk's first trajectory."""
    chunks: list[str] = []
    starts: list[int] = []
    for start, texts in _batches(browsed):
        starts.append(start)
        chunks.append(_packed(b"[" + b",".join(texts) + b"]"))
    return chunks, starts


def _batches(browsed: Sequence[ReadableTrajectory]) -> Iterator[tuple[int, list[bytes]]]:
    texts: list[bytes] = []
    size = 0
    for number, item in enumerate(browsed):
        text = zlib.decompress(item.text)
        if texts and (len(texts) == _CHUNK or size + len(text) > _CHUNK_BYTES):
            yield number - len(texts), texts
            texts, size = [], 0
        texts.append(text)
        size += len(text)
    if texts:
        yield len(browsed) - len(texts), texts
