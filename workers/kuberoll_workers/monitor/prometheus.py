"""A local Prometheus for a run on this machine, with the same alert rules as in a cluster.

async with prometheus(targets, directory, environment) as url: ...
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import aiohttp

from kuberoll_workers.serving.ray_settings import free_ports

PROGRAM: Final = "prometheus"
RULES: Final = Path(__file__).with_name("alerts.yaml")
INSTALL_HINT: Final = (
    "there is no `prometheus` program on the PATH: `apt install prometheus` on Debian and Ubuntu, `brew install "
    "prometheus` on macOS, or an archive of https://prometheus.io/download"
)

_CONFIGURATION: Final = "prometheus.yml"
SCRAPE_SECONDS: Final = 2
_READY_SECONDS = 60.0
_LOOK_SECONDS = 0.05
_STOP_SECONDS = 10.0
_LAST_WORDS = 3

# It has the metrics of one run only, so no labels are selected.
_GRAPHS: Final = (
    "sum by (state) (kuberoll_trajectories_active)",
    "60 * sum by (environment, stop_reason) (rate(kuberoll_trajectories_total[30s]))",
    "sum by (kind) (rate(kuberoll_tokens_total[30s]))",
    "histogram_quantile(.95, sum by (le) (rate(kuberoll_turn_generation_seconds_bucket[30s])))",
)


class PrometheusUnavailable(Exception):
    """Prometheus is not installed or does not start; the message has the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A scrape target with `/metrics`.

    Attributes:
        name: Name of the scrape job.
        address: `host:port`.
        labels: Labels added to all its metrics.
    """

    name: str
    address: str
    labels: Mapping[str, str] = field(default_factory=dict)


def configuration(targets: Sequence[Target], *, seconds: float = SCRAPE_SECONDS) -> dict[str, Any]:
    """Prometheus' configuration: the targets, scraped every `seconds`, and the alert rules."""
    interval = f"{round(1000 * seconds)}ms"
    return {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {
                "job_name": target.name,
                "static_configs": [{"targets": [target.address], "labels": dict(target.labels)}],
            }
            for target in targets
        ],
    }


def graph_url(url: str, *, minutes: int = 15) -> str:
    """URL of a page with graphs of a run: trajectories in flight and ended, tokens, seconds of turns."""
    fields = [
        (f"g{number}.{name}", value)
        for number, graph in enumerate(_GRAPHS)
        for name, value in (("expr", graph), ("tab", "0"), ("range_input", f"{minutes}m"))
    ]
    return f"{url}/graph?{urlencode(fields)}"


@asynccontextmanager
async def prometheus(
    targets: Sequence[Target],
    directory: Path,
    *,
    environment: Mapping[str, str] | None = None,
    seconds: float = SCRAPE_SECONDS,
) -> AsyncIterator[str]:
    """Run a Prometheus on loopback while the context lasts.

    Args:
        directory: Directory of its configuration, log and data; existing data is kept.
        environment: Additional environment variables of its process.
        seconds: Scrape interval.

    Yields:
        Its URL, when it is ready.

    Raises:
        PrometheusUnavailable: It is not installed or does not start.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        raise PrometheusUnavailable(INSTALL_HINT)
    log = _prepare(directory, configuration(targets, seconds=seconds))
    (port,) = free_ports(1)
    with log.open("wb") as words:
        process = await asyncio.create_subprocess_exec(
            program,
            f"--config.file={directory / _CONFIGURATION}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            env={**os.environ, **(environment or {})},
            # Ctrl-C at the terminal must reach the run only, which stops Prometheus last.
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        await _ready(process, url, log)
        yield url
    finally:
        await _stop(process)


def _prepare(directory: Path, settings: Mapping[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    # JSON is YAML.
    (directory / _CONFIGURATION).write_text(json.dumps(settings, indent=2) + "\n")
    return directory / "prometheus.log"


async def _ready(process: asyncio.subprocess.Process, url: str, log: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_READY_SECONDS)) as http:
        while time.monotonic() < deadline:
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with http.get(f"{url}/-/ready") as answer:
                    if answer.status == 200:
                        return
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await process.wait()
            if process.returncode is not None:
                raise PrometheusUnavailable(
                    f"Prometheus exited at its start (exit code {process.returncode}); see {log}\n{_last_words(log)}"
                )
    raise PrometheusUnavailable(f"Prometheus was not ready within {_READY_SECONDS:g} s; see {log}")


def _last_words(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LAST_WORDS:])


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
