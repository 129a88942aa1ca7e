"""The page of the protocol: its transcript is what a server answers."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.environments.remote.servers import ServerProcess

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl"),
]

DOCS = Path(__file__).parents[3] / "docs" / "reference"


def test_the_transcript_is_what_a_server_answers(tmp_path: Path) -> None:
    [code] = re.findall(r"```python\n(import random\n.*?class Walk.*?)```", (DOCS / "episodes.md").read_text(), re.S)
    (tmp_path / "walk.py").write_text(code)
    blocks = re.findall(r"```console\n(.*?)```", (DOCS / "environment-protocol.md").read_text(), re.S)
    server = ServerProcess("walk:Walk", variables={"PYTHONPATH": str(tmp_path)})
    try:
        server.ready()
        calls = re.findall(r"^\$ (curl .*)\n((?:(?!\$ ).*\n)*)", blocks[1], re.M)
        assert len(calls) == 6
        for command, printed in calls:
            ours = command.replace("localhost:8700", f"127.0.0.1:{server.port}")
            answered = subprocess.run(ours, shell=True, capture_output=True, text=True, check=True).stdout
            assert re.sub(r'"digest":"\w+"', '"digest":"…"', answered).strip() == printed.strip()
    finally:
        server.close()
