"""Tasks that are partly right are worth what Harbor gives for them, but for what is said to differ."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from kuberoll_workers.sandboxes import drivers
from kuberoll_workers.sandboxes.errors import SandboxUnavailable
from tests.harbor.kinds import Impossible
from tests.harbor.partial_kinds import PARTIAL_KINDS, bash_layout, expected, write_partial_tasks
from tests.harbor.rewarding import both_rewards
from tests.sandboxes.layouts import BUSYBOX

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(BUSYBOX is None or sys.platform != "linux", reason="needs Debian's busybox-static"),
]


def test_they_are_worth_what_harbor_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv(drivers.VARIABLE, "namespaces")
    try:
        image = bash_layout(tmp_path / "image")
        write_partial_tasks(tmp_path / "tasks", image=image)
        found = asyncio.run(both_rewards(tmp_path / "tasks"))
    except (Impossible, SandboxUnavailable) as missing:
        pytest.skip(str(missing))
    assert found == {name: expected(kind) for name, kind in PARTIAL_KINDS.items()}
