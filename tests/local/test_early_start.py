"""The worker that starts before its manifest has been read."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kuberoll_api.manifest.loading import load_job
from kuberoll_workers.local.early_start import EarlyStart, early_start
from kuberoll_workers.local.options import RunOptions
from kuberoll_workers.local.preflight import check
from kuberoll_workers.local.worker_setup import WorkerSetup
from kuberoll_workers.output.run_directory import new_manifest
from kuberoll_workers.output.storage import open_storage
from tests.local.support import manifest, run_to_end


@pytest.fixture
def early(tmp_path: Path) -> Iterator[EarlyStart]:
    with early_start(tmp_path) as started:
        yield started


def setup(early: EarlyStart, directory: Path, **spec: Any) -> WorkerSetup:
    job = load_job(manifest(directory / "job.yaml", **spec))
    (directory / "logs").mkdir()
    return WorkerSetup(
        job=job, options=RunOptions(base=directory, output=str(directory)), storage=open_storage(str(directory)),
        preflight=check(job, base=directory), shards=1, directory=directory, early=early, endpoint=False,
        manifest=new_manifest(job, shards=1, inputs={}),
    )  # fmt: skip


def path_of(process: psutil.Process) -> str:
    """Its PYTHONPATH; empty if it has ended."""
    try:
        return process.environ().get("PYTHONPATH", "")
    except psutil.Error:
        return ""


def test_it_ends_with_its_context(tmp_path: Path) -> None:
    with early_start(tmp_path) as early:
        worker = psutil.Process(early.worker.pid)
        assert "kuberoll_workers.worker" in worker.cmdline()
        assert early.metrics.is_dir()
    assert not worker.is_running()
    assert not early.scratch.exists()


def test_the_first_worker_is_the_early_one_and_has_its_own_log(early: EarlyStart, tmp_path: Path) -> None:
    made = setup(early, tmp_path)

    async def start() -> None:
        worker = await made.start(0)
        assert worker is early.worker
        assert worker.log == tmp_path / "logs" / "worker-0.log"
        other = await made.start(1)
        assert other.pid != worker.pid
        # What it cannot read is an error in the log of its run.
        await worker.send_line(b"no configuration")
        assert await worker.wait() == 1
        await other.stop(0.0)

    early.runner.run(start())
    assert "Invalid JSON" in (tmp_path / "logs" / "worker-0.log").read_text()
    assert (early.scratch / "worker.log").read_text() == ""


@pytest.mark.parametrize("reason", ["variables", "death"])
def test_another_one_starts_where_the_early_one_cannot_be_used(early: EarlyStart, tmp_path: Path, reason: str) -> None:
    workers = {"env": [{"name": "PYTHONHASHSEED", "value": "7"}]} if reason == "variables" else {}
    made = setup(early, tmp_path, workers=workers)

    async def start() -> None:
        if reason == "death":
            early.worker.signal(signal.SIGKILL)
            await early.worker.wait()
        worker = await made.start(0)
        assert worker.pid != early.worker.pid
        assert early.worker.returncode is not None
        # The kernel shows none of a process that is just being started.
        while not (environment := psutil.Process(worker.pid).environ()):  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert early.variables.items() <= environment.items()
        assert environment.get("PYTHONHASHSEED") == ("7" if reason == "variables" else None)
        await worker.stop(0.0)

    early.runner.run(start())


def test_a_refused_run_leaves_nothing(tmp_path: Path) -> None:
    before = {process.pid for process in psutil.process_iter()}
    code, text = run_to_end(manifest(tmp_path / "job.yaml", environments=[{"name": "a", "type": "mth"}]))
    assert code == 2, text
    left = {process.pid for process in psutil.process_iter() if path_of(process).startswith(str(tmp_path))}
    assert left <= before
