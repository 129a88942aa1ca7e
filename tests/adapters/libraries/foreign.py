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


@contextlib.contextmanager
def server(script: str, *arguments: str, path: Path, log: Path) -> Iterator[str]:
    """Address of a server that a script of the tests serves; it prints its port when it listens.

    Args:
        path: Packages of the server.
        log: File for its error output.
    """
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / script), *arguments],
            cwd=log.parent,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (path, ROOT)))},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            assert process.stdout is not None
            # Libraries print, too.
            for line in process.stdout:
                if line.startswith("port "):
                    break
            else:
                pytest.fail(f"the server did not start: {log.read_text()[-3000:]}")
            yield f"http://127.0.0.1:{line.split()[1]}"
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
