"""Trouble outside the loop, in real runs: a sentence that says what to do, and nothing lost or doubled."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kuberoll_workers.local.scratch import scratch_directory
from kuberoll_workers.local.watchdog import processes_of
from kuberoll_workers.output.storage import open_storage
from tests.local.support import (
    external_generation,
    manifest,
    run_to_end,
    running,
    trajectories,
    wait_for_trajectories,
    wait_until_none_is_left,
)
from tests.output.s3 import S3Server, s3, s3_server

__all__ = ["s3", "s3_server"]

DATASET = {"source": {"generator": {"count": 100}}, "repeats": 4}


@pytest.fixture
def generation() -> Iterator[dict[str, Any]]:
    """Somebody else's engine."""
    with external_generation(0.02) as served:
        yield served


def keys(output: Path) -> list[Any]:
    return sorted(record.key for record in trajectories(output))


def test_a_worker_without_its_run_and_watchdog_ends_and_the_run_goes_on_at_once(
    generation: dict[str, Any], tmp_path: Path
) -> None:
    job = manifest(
        tmp_path / "job.yaml", dataset=DATASET, workers={"replicas": 2}, generation=generation,
        rollout={"concurrency": 4},
    )  # fmt: skip
    output = tmp_path / "out"
    with running(job, "--output", output, "--metrics-port", "0") as run:
        wait_for_trajectories(run, output, 20)
        run_id = run.run_id()
        (watchdog,) = [
            child
            for child in psutil.Process(run.process.pid).children()
            if "kuberoll_workers.local.watchdog" in child.cmdline()
        ]
        workers = list(processes_of(run_id))
        assert len(workers) == 2
        watchdog.kill()
        run.process.send_signal(signal.SIGKILL)
        run.process.wait()
        code, text = run_to_end(job, "--output", output, "--metrics-port", "0", "--resume")
    assert code == 0, text
    # Neither of them wrote beside the new ones, nor lives.
    assert not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers)
    found = keys(output)
    assert len(found) == 400
    assert len(set(found)) == 400


@pytest.mark.ray
@pytest.mark.parametrize("how", [pytest.param("two interrupts", marks=pytest.mark.long), "a kill"])
def test_what_a_stopped_run_started_is_gone_as_soon_as_its_watchdog_is(how: str, tmp_path: Path) -> None:
    environments = [
        {"name": "puzzle", "type": "sliding_puzzle", "config": {"size": 2, "maxMoves": 6}, "isolation": "Process"}
    ]
    job = manifest(tmp_path / "job.yaml", dataset=DATASET, rollout={"concurrency": 4}, environments=environments)
    document = json.loads(job.read_text())
    document["spec"]["generation"]["simulated"]["firstTokenSeconds"] = 0.5
    job.write_text(json.dumps(document))
    output = tmp_path / "out"
    with running(job, "--output", output, "--metrics-port", "0", "--serve") as run:
        wait_for_trajectories(run, output, 2)
        run_id = run.run_id()
        below = psutil.Process(run.process.pid).children(recursive=True)
        (watchdog,) = [process for process in below if "kuberoll_workers.local.watchdog" in process.cmdline()]
        titles = [" ".join(process.cmdline()) for process in below]
        assert any("environments.keeper" in title for title in titles)
        assert any("DashboardAgent" in title for title in titles)
        of_ray = [process for process in below if process in set(processes_of(run_id))]
        if how == "a kill":
            run.process.kill()
        else:
            run.process.send_signal(signal.SIGINT)
            run.until("press Ctrl-C again")
            run.process.send_signal(signal.SIGINT)
        run.finish()
        psutil.wait_procs([watchdog], timeout=60)
        assert not watchdog.is_running()
        assert [process for process in of_ray if _lives(process)] == []
        # Those of environments end when their worker does.
        assert [process for process in psutil.wait_procs(below, timeout=60)[1] if _lives(process)] == []


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kills", [3, pytest.param(40, marks=pytest.mark.long)])
def test_runs_whose_processes_are_killed_lose_and_double_nothing(
    kills: int, generation: dict[str, Any], tmp_path: Path
) -> None:
    job = manifest(
        tmp_path / "job.yaml", dataset=DATASET, workers={"replicas": 2}, generation=generation,
        rollout={"concurrency": 4},
    )  # fmt: skip
    draw = random.Random(f"{kills} kills")
    left, runs = kills, 0
    while left > 0:
        output = tmp_path / f"out-{runs}"
        runs += 1
        before: list[Any] = []
        while left > 0 and len(before) < 400:
            with running(job, "--output", output, "--metrics-port", "0", *(["--resume"] if before else [])) as run:
                run_id = run.run_id()
                wait_for_trajectories(run, output, min(399, len(before) + draw.randrange(100)))
                family = [psutil.Process(run.process.pid), *psutil.Process(run.process.pid).children()]
                workers = [process for process in family if "kuberoll_workers.worker" in process.cmdline()]
                for process in draw.choice([family[:1], workers[:1], workers, family]):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                run.finish()
            left -= 1
            wait_until_none_is_left(run_id)
            found = keys(output)
            assert len(found) == len(set(found))
            assert set(before) <= set(found)
            before = found
        code, text = run_to_end(job, "--output", output, "--metrics-port", "0", "--resume")
        assert code == 0, text
        found = keys(output)
        assert len(found) == len(set(found)) == 400
        assert set(before) <= set(found)


def test_two_never_write_one_shard(generation: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out"
    output.mkdir()
    holding = subprocess.Popen(
        [
            sys.executable, "-c",
            "import sys; from pathlib import Path\n"
            "from kuberoll_workers.output.storage import DirectoryStorage\n"
            f"DirectoryStorage(Path({str(output)!r})).hold_shards([0]); print('held', flush=True); sys.stdin.read()",
        ],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert holding.stdout is not None
        assert holding.stdout.readline() == b"held\n"
        job = manifest(tmp_path / "job.yaml", generation=generation)
        code, text = run_to_end(job, "--output", output, "--metrics-port", "0")
    finally:
        holding.communicate()
    assert code == 1
    assert "is still writing shard 0: end it" in text
    assert "Traceback" not in text
    assert trajectories(output) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", place], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a small disk needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk_is_said_and_the_run_goes_on_when_there_is_room(
    generation: dict[str, Any], small_disk: Path, tmp_path: Path
) -> None:
    job = manifest(tmp_path / "job.yaml", dataset=DATASET, generation=generation)
    output = small_disk / "out"
    code, text = run_to_end(job, "--output", output, "--metrics-port", "0")
    assert code == 1, text
    assert "No space left on device" in text
    assert f"continue with --resume --output {output}" in text
    assert "Traceback" not in text
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    before = keys(output)
    code, text = run_to_end(job, "--output", output, "--metrics-port", "0", "--resume")
    assert code == 0, text
    found = keys(output)
    assert len(found) == len(set(found)) == 400
    assert set(before) <= set(found)


@pytest.mark.parametrize("refused", ["report.html", "aggregate_metrics.json"])
def test_a_store_that_refuses_what_is_made_of_the_run(
    refused: str, s3: tuple[S3Server, str], generation: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    server, uri = s3
    server.refused = (refused,)
    job = manifest(tmp_path / "job.yaml", generation=generation)
    code, text = run_to_end(job, "--output", f"{uri}/run", "--metrics-port", "0")
    assert code == 3, text
    assert "all trajectories are stored" in text
    assert "Traceback" not in text
    command = {"report.html": "report", "aggregate_metrics.json": "aggregate"}[refused]
    assert f"`kuberoll {command} {uri}/run` to make it again" in text
    server.refused = ()
    kuberoll = [sys.executable, "-c", "from kuberoll_api.cli import main; main()"]
    subprocess.run([*kuberoll, command, f"{uri}/run"], check=True, capture_output=True)
    assert open_storage(f"{uri}/run").read(refused) is not None


@pytest.mark.parametrize("trouble", ["parquet", "foreign", "manifest"])
def test_what_cannot_be_gone_on_with_is_refused_in_one_line_before_anything_starts(
    trouble: str, generation: dict[str, Any], tmp_path: Path
) -> None:
    job = manifest(tmp_path / "job.yaml", generation=generation, workers={"shards": 2})
    output = tmp_path / "out"
    assert run_to_end(job, "--output", output, "--metrics-port", "0")[0] == 0
    if trouble == "parquet":
        (output / "shard-00000.parquet").write_bytes(b"PAR1 torn")
        words = "shard-00000.parquet: not a Parquet file"
    elif trouble == "foreign":
        shard = output / "shard-00001.jsonl"
        line = shard.read_text().splitlines()[0]
        shard.write_text(shard.read_text() + json.dumps({**json.loads(line), "rollout_index": 7}) + "\n")
        words = "shard-00001.jsonl:17: rollout_index 7: no task of this run has more than 4 samples"
    else:
        (output / "manifest.json").write_bytes(b"\xff\xfe")
        words = "manifest.json: not a run's manifest"
    before = {path: path.read_bytes() for path in output.iterdir() if path.is_file()}
    code, text = run_to_end(job, "--output", output, "--metrics-port", "0", "--resume")
    assert code == 2, text
    assert words in text
    assert "Traceback" not in text
    assert "metrics: http" not in text
    assert {path: path.read_bytes() for path in output.iterdir() if path.is_file()} == before


HOOKS = """
import sys, threading
class Hooks:
    def __init__(self, config): self.kind = config["kind"]
    def step(self, logs, metadata):
        n = len(logs)
        return [{"role": "user", "content": ""}] * n, metadata, [None] * n, [1.0] * n, [True] * n
    def global_post_process_and_metrics(self, batch):
        if self.kind == "exit": sys.exit(6)
        values = {"number": 1, 2: {3: 4}, object(): 5, "big": 1 << 70, "set": {1}, "half": "\\ud800"}
        values["self"] = values
        return batch, values
"""


@pytest.mark.parametrize(
    ("kind", "words"),
    [("exit", "called sys.exit(6)"), ("values", '"big": "JSON cannot represent it: Integer exceeds 64-bit range"')],
)
def test_hooks_that_misbehave_cost_their_own_metrics_alone(
    kind: str, words: str, generation: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "hooks.py").write_text(HOOKS)
    job = manifest(
        tmp_path / "job.yaml",
        environments=[{"name": "hooks", "entrypoint": "hooks:Hooks", "config": {"kind": kind}}],
        dataset={"source": {"rows": [{"prompt": "x"}]}},
        generation=generation,
    )
    code, text = run_to_end(job, "--output", tmp_path / "out", "--metrics-port", "0")
    assert code == 0, text
    assert "Traceback" not in text
    aggregates = json.loads((tmp_path / "out" / "aggregate_metrics.json").read_text())["environments"]["hooks"]
    assert words in json.dumps(aggregates["environment_metrics"])
    assert (tmp_path / "out" / "report.html").exists()


def test_an_interrupt_before_anything_was_started_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import pathlib, threading\n"
        "class Slow:\n"
        "    def __init__(self, config): pass\n"
        "    def step(self, logs, metadata): raise NotImplementedError\n"
        "    def global_post_process_and_metrics(self, batch): return batch, {}\n"
        "    def generate_dataset(self, count, seed):\n"
        "        print('generating', flush=True)\n"
        "        while True: threading.Event().wait(0.1)\n"
    )
    job = manifest(
        tmp_path / "job.yaml",
        environments=[{"name": "slow", "entrypoint": "slow:Slow"}],
        dataset={"source": {"generator": {"count": 3}}},
    )
    with running(job, "--output", tmp_path / "out", "--metrics-port", "0") as run:
        run.until("generating")
        # CPython may miss a signal that comes just as it begins to wait; a person presses Ctrl-C again.
        for _ in range(5):
            run.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.process.wait(20)
                break
        assert run.finish() == 130, run.lines
    assert run.lines[-1].startswith("interrupted; stored trajectories are kept")
    assert not any("Traceback" in line for line in run.lines)


def test_scratch_directories_of_runs_that_are_gone_are_removed(tmp_path: Path) -> None:
    with scratch_directory(tmp_path) as held:
        left = tmp_path / "kr-left"
        left.mkdir()
        (left / ".owner").touch()
        (left / "generation.json").write_text("{}")
        others = tmp_path / "kr-of-others"
        others.mkdir()
        with scratch_directory(tmp_path):
            assert held.exists()
            assert others.exists()
            assert not left.exists()


def test_failures_of_the_terminal_kind_do_nothing_to_it(generation: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "escaping.py").write_text(
        "class Escaping:\n"
        "    def __init__(self, config): pass\n"
        "    def step(self, logs, metadata): raise RuntimeError('\\x1b]0;title\\x07 \\x1b[2J [/red]')\n"
        "    def global_post_process_and_metrics(self, batch): return batch, {'\\x1b[2J': '[/x] \\x1b[2J'}\n"
    )
    job = manifest(
        tmp_path / "job.yaml",
        environments=[{"name": "e", "entrypoint": "escaping:Escaping"}],
        dataset={"source": {"rows": [{"prompt": "x"}]}},
        rollout={"retries": {"backoffSeconds": 0}},
        generation=generation,
    )
    code, text = run_to_end(job, "--output", tmp_path / "out", "--metrics-port", "0")
    assert code == 1
    assert "␛]0;title␇ ␛[2J [/red]" in text
    assert "\x1b" not in text
