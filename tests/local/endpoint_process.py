"""An external endpoint in a process of its own, for tests that kill, stop or restart it.

    python -m tests.local.endpoint_process PORT [REFUSALS]

It prints its URL when it serves. It answers 503 to each generation request while the file REFUSALS exists.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kuberoll_workers.data.lifetime import end_with_parent
from tests.local.support import Endpoint

RESPONSE_SECONDS = 0.03


@contextmanager
def endpoint_process(port: int, *, refusals: Path) -> Iterator[subprocess.Popen[str]]:
    """Start the process, and wait until it serves; it is killed at the end."""
    command = [sys.executable, "-m", "tests.local.endpoint_process", str(port), str(refusals)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"http://127.0.0.1:{port}\n"
        yield process
    finally:
        process.kill()
        process.communicate()


async def _serve(port: int, refusals: Path) -> None:
    endpoint = Endpoint(RESPONSE_SECONDS)
    endpoint.refuses = lambda request: refusals.exists()
    async with endpoint.serving(port):
        sys.stdout.write(f"{endpoint.url}\n")
        sys.stdout.flush()
        await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    end_with_parent()
    asyncio.run(_serve(int(sys.argv[1]), Path(sys.argv[2])))
