"""Packages that cannot be installed beside KubeRoll's, in directories of their own, and servers from them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[3]
CACHE = Path(os.environ.get("KUBEROLL_TEST_CACHE", Path.home() / ".cache" / "kuberoll-tests"))
PORT_VARIABLE = "TEST_SERVER_PORT"
"""Variable of a script with the port that it serves at; 0: a free one."""


def packages(name: str, requirements: Sequence[str]) -> Path:
    """A directory with packages, for `PYTHONPATH`; what they need beyond these is that of this environment.

    It is kept for later runs. A test that cannot have it is skipped.

    Args:
        name: Of the directory, with what determines its content.
        requirements: Complete, in pip's form. Packages for newer versions of Python are installed, too.
    """
    directory = CACHE / f"{name}-python{sys.version_info.major}.{sys.version_info.minor}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / f"{name}.lock"):
        if not directory.exists():
            made = Path(tempfile.mkdtemp(dir=CACHE))
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-requires-python"]
            done = subprocess.run(
                [*pip, "--target", str(made), *requirements], capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                shutil.rmtree(made)
                pytest.skip(f"{name} cannot be installed: {done.stderr[-500:]}")
            made.chmod(0o755)
            made.rename(directory)
    return directory


class Server:
    """A server that a script of the tests serves, which may be killed and started again at its port."""

    def __init__(self, script: str, *arguments: str, path: Path, log: Path) -> None:
        """Start it, and wait until it listens: it prints its port then.

        Args:
            path: Packages of the server.
            log: File for its error output.
        """
        self._command = [sys.executable, str(Path(__file__).parent / script), *arguments]
        self._path, self._log = path, log
        self._port = "0"
        self._process = self._started()
        assert self._process.stdout is not None
        # Libraries print, too.
        for line in self._process.stdout:
            if line.startswith("port "):
                self._port = line.split()[1]
                break
        else:
            pytest.fail(f"the server did not start: {log.read_text()[-3000:]}")

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._port}"

    def restart(self) -> None:
        """Kill it and start it again at the same port, without waiting until it listens."""
        self.close()
        self._process = self._started()

    def close(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _started(self) -> subprocess.Popen[str]:
        path = os.pathsep.join(map(str, (self._path, ROOT)))
        with self._log.open("ab") as errors:
            return subprocess.Popen(
                self._command,
                cwd=self._log.parent,
                env={**os.environ, "PYTHONPATH": path, PORT_VARIABLE: self._port},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )


@contextlib.contextmanager
def server(script: str, *arguments: str, path: Path, log: Path) -> Iterator[str]:
    """Address of a server; see `Server`."""
    started = Server(script, *arguments, path=path, log=log)
    try:
        yield started.url
    finally:
        started.close()
