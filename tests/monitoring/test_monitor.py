"""`kuberoll run --monitor`: a Prometheus that sees the run and its engine, and ends with them, whatever ends them."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import aiohttp
import pytest

from kuberoll_workers.local.watchdog import processes_of
from kuberoll_workers.monitor.prometheus import PROGRAM, PrometheusUnavailable, Target, configuration, prometheus
from tests.local.support import (
    EXAMPLES,
    Run,
    external_generation,
    manifest,
    run_to_end,
    running,
    wait_until_none_is_left,
)
from tests.local.test_run import slow_down
from tests.monitoring.support import Api, until
from tests.monitoring.test_queries import RECORDED

installed = pytest.mark.skipif(shutil.which(PROGRAM) is None, reason="Prometheus is not installed")


def ask(url: str, question: Callable[[Api], Awaitable[Any]]) -> Any:
    """What a Prometheus answers, from a test that is no coroutine."""

    async def asked() -> Any:
        async with aiohttp.ClientSession() as http:
            return await question(Api(url, http))

    return asyncio.run(asked())


def wait_for(run: Run, url: str, *expressions: str) -> None:
    """Wait until each of them has a value that is not 0."""

    async def question(api: Api) -> None:
        async def all_are_there() -> bool:
            assert run.process.poll() is None, "\n".join(run.lines)
            return all([await api.number(expression) > 0 for expression in expressions])

        await until(all_are_there)

    ask(url, question)


@installed
@pytest.mark.ray
def test_it_sees_the_run_and_ends_when_the_run_is_killed(tmp_path: Path) -> None:
    job = manifest(tmp_path / "job.yaml", workers={"replicas": 2}, dataset={"source": {"generator": {"count": 5000}}})
    slow_down(job, seconds=1.0)
    output = tmp_path / "out"
    with running(job, "--output", output, "--metrics-port", "0", "--monitor", "--serve") as run:
        url = run.until(r"^prometheus: (http://127\.0\.0\.1:\d+)")[1]
        page = run.until(r"^graphs: (\S+)")[1]
        run_id = run.run_id()
        shown = [value for name, value in parse_qsl(urlsplit(page).query) if name.endswith(".expr")]
        assert len(shown) > 3
        planned = 'sum(kuberoll_trajectories_planned{rolloutjob="test"})'
        wait_for(run, url, planned, *(f"count({expression})" for expression in shown), 'count({rolloutjob="test"})')
        # The engine is simulated; Ray is not.
        wait_for(run, url, 'count(ray_serve_num_http_requests_total{rolloutjob="test"})', "sum(up) == 2")
        assert ask(url, lambda api: api.number(planned)) == 5000
        groups = ask(url, lambda api: api.get("rules"))["groups"]
        assert [group["name"] for group in groups] == ["kuberoll-jobs", "kuberoll-operator"]
        assert PROGRAM in {process.name() for process in processes_of(run_id)}
        run.process.send_signal(signal.SIGKILL)
    wait_until_none_is_left(run_id)
    # What it has seen stays with the run.
    assert (output / "prometheus" / "data" / "wal").is_dir()


@installed
@pytest.mark.long
def test_a_run_that_ends_ends_it(tmp_path: Path) -> None:
    job = manifest(tmp_path / "job.yaml")
    with running(job, "--output", tmp_path / "out", "--metrics-port", "0", "--monitor") as run:
        run.until(r"^prometheus: ")
        run_id = run.run_id()
        assert run.finish() == 0, run.lines
        assert list(processes_of(run_id)) == []


def test_without_prometheus_the_run_goes_on_and_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for directory in os.environ["PATH"].split(os.pathsep):
        for path in Path(directory).glob("*"):
            if path.name != PROGRAM and not (programs / path.name).is_symlink():
                (programs / path.name).symlink_to(path)
    monkeypatch.setenv("PATH", str(programs))
    with external_generation() as generation:
        job = manifest(tmp_path / "job.yaml", generation=generation)
        code, text = run_to_end(job, "--output", tmp_path / "out", "--metrics-port", "0", "--monitor")
    assert code == 0, text
    assert "--monitor: there is no `prometheus` program on the PATH: `apt install prometheus`" in text


@installed
async def test_one_that_does_not_start_says_why(tmp_path: Path) -> None:
    twice = [Target(name="run", address=f"127.0.0.1:{port}") for port in (1, 2)]
    with pytest.raises(PrometheusUnavailable, match=r"exit code \d[\s\S]*multiple scrape configs"):
        async with prometheus(twice, tmp_path):
            pass


def test_labels_are_those_of_the_target() -> None:
    made = configuration([Target(name="engine", address="127.0.0.1:1", labels={"rolloutjob": "a"})], seconds=0.5)
    assert made["scrape_configs"] == [
        {"job_name": "engine", "static_configs": [{"targets": ["127.0.0.1:1"], "labels": {"rolloutjob": "a"}}]}
    ]
    assert made["global"]["scrape_interval"] == "500ms"
    assert [Path(name).name for name in made["rule_files"]] == ["alerts.yaml"]


@installed
@pytest.mark.engine
@pytest.mark.long
def test_a_real_engine_exports_what_is_recorded(tmp_path: Path) -> None:
    recorded = _labels(RECORDED[-1].read_text())
    assert "ray_vllm_num_requests_running" in recorded
    changes = ("--set", "spec.dataset.source.generator.count=5000", "--set", "spec.workers.replicas=1")
    job = EXAMPLES / "mixed" / "rolloutjob.yaml"
    with running(job, "--output", tmp_path / "out", "--metrics-port", "0", "--monitor", *changes, torch=True) as run:
        url = run.until(r"^prometheus: (http://127\.0\.0\.1:\d+)")[1]
        # Two reports of Ray, ten seconds apart, and what is there only once it has counted.
        wait_for(run, url, *(f'count({name}{{rolloutjob="mixed"}})' for name in recorded))
        wait_for(run, url, "sum(rate(ray_vllm_generation_tokens_total[1m]))")
        for name, labels in recorded.items():
            ((exported, _), *_) = ask(url, partial(Api.query, expression=name))
            assert labels <= set(exported), name
        run.process.send_signal(signal.SIGINT)
        assert run.finish() == 130, run.lines


def _labels(text: str) -> dict[str, set[str]]:
    """The labels of each series of an exposition, by its name."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name = re.split(r"[{ ]", line)[0]
            found[name] = set(re.findall(r'(\w+)="', line))
    return found


def test_the_record_is_of_real_replicas() -> None:
    text = RECORDED[-1].read_text()
    assert len(set(re.findall(r'ReplicaId="(\w+)"', text))) == 2
    assert set(re.findall(r'model_name="([^"]*)"', text)) == {"tiny-policy"}
