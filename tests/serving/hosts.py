"""The policy host as a process, as `kuberoll run` starts it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from kuberoll_workers.local.watchdog import end_processes, processes_of, run_variables
from kuberoll_workers.policy.auth import Tokens
from tests.without_torch import without_torch

PATIENCE_SECONDS = 240
TOKENS = Tokens(generate="to-sample-with", weights="to-publish-with", read="to-look-with")


class StartingHost:
    """A host whose events are read one by one."""

    def __init__(self, scratch: Path, tokens: Tokens | None = None, *, drains: bool, torch: bool, **app: Any) -> None:
        self.run_id, self.scratch = uuid.uuid4().hex, scratch
        config = scratch / "config.json"
        settings = {"model": "none", "tokenizer": "none", "engine": "Simulated", "simulated": {}, **app}
        shown = None if tokens is None else msgspec.to_builtins(tokens)
        config.write_text(json.dumps({"app": settings, "scratch": str(scratch), "tokens": shown, "drains": drains}))
        variables = without_torch() if settings["engine"] == "Simulated" and not torch else os.environ
        with (scratch / "log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kuberoll_workers.serving.host", "--config", str(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**variables, **run_variables(self.run_id), "TMPDIR": str(scratch)},
            )

    def event(self) -> dict[str, Any] | None:
        """The next one; None at the end."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return dict(json.loads(line)) if line else None

    def left(self) -> list[str]:
        """Names of its processes that still run."""
        return [process.name() for process in processes_of(self.run_id)]


@contextmanager
def starting(
    *, tokens: Tokens | None = None, drains: bool = True, torch: bool = False, **app: Any
) -> Iterator[StartingHost]:
    # Not pytest's directory: the paths of sockets below it would be too long.
    scratch = Path(tempfile.mkdtemp(prefix="kr-", dir="/tmp"))
    host = StartingHost(scratch, tokens, drains=drains, torch=torch, **app)
    try:
        yield host
    finally:
        end_processes(host.run_id)
        host.process.wait(timeout=PATIENCE_SECONDS)
        for pipe in (host.process.stdin, host.process.stdout):
            assert pipe is not None
            pipe.close()
        shutil.rmtree(scratch, ignore_errors=True)


def until_ready(host: StartingHost) -> list[dict[str, Any]]:
    """All events up to `ready`, which is the last."""
    events: list[dict[str, Any]] = []
    while (event := host.event()) is not None:
        events.append(event)
        if event["event"] == "ready":
            return events
    raise AssertionError(events)
