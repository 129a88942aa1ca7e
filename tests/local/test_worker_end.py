"""The end of a worker's process: nothing that an environment has left in it keeps it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import concurrent.futures, threading
from kuberoll_workers.worker.__main__ import end
threading.Thread(target=threading.Event().wait, name="left-behind").start()
concurrent.futures.ThreadPoolExecutor(1).submit(threading.Event().wait)
print("stored")
end({code})
"""


@pytest.mark.parametrize("code", [0, 1])
def test_threads_that_an_environment_has_left_do_not_keep_a_worker(code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(code=code)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (code, "stored\n")
    assert "left-behind" in done.stderr
