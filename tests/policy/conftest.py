"""A Serve app of the simulated engine, started once for all tests that need one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kuberoll_workers.local.watchdog import RUN_ID_VARIABLE, end_processes

STOP_SECONDS = 60


class HostProcess:
    """The host as `kuberoll run` starts it."""

    def __init__(self, scratch: Path, app: dict[str, object]) -> None:
        self.run_id = uuid.uuid4().hex
        config = scratch / "config.json"
        config.write_text(json.dumps({"app": app, "scratch": str(scratch)}))
        self.log = scratch / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kuberoll_workers.policy.host", "--config", str(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, RUN_ID_VARIABLE: self.run_id, "TMPDIR": str(scratch)},
            )
        self.url = self._wait()

    def _wait(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                return str(event["url"])
            assert event["event"] == "phase", event
        raise AssertionError(self.log.read_text())

    def stop(self) -> int:
        """Close its input, as a parent that is gone does; the exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(timeout=STOP_SECONDS)


@pytest.fixture(scope="session")
def simulated_host() -> Iterator[HostProcess]:
    # Not pytest's directory: the paths of sockets below it would be too long.
    scratch = Path(tempfile.mkdtemp(prefix="kr-", dir="/tmp"))
    app = {
        "model": "none",
        "tokenizer": "none",
        "engine": "Simulated",
        "engine_args": {"max_model_len": 1000},
        "simulated": {"firstTokenSeconds": 0.0, "meanTokens": 20},
        "replicas": 2,
    }
    host = HostProcess(scratch, app)
    try:
        yield host
    finally:
        if host.process.poll() is None:
            host.stop()
        end_processes(host.run_id)
        shutil.rmtree(scratch, ignore_errors=True)
