"""What processes of test_spare_interpreter.py do."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

# Imported by nothing else here.
UNUSUAL = "colorsys"


def end(code: int) -> None:
    sys.exit(code)


def report(path: str, text: str = "") -> None:
    """Write the process's id, whether it had imported a module beforehand, and its variable."""
    line = f"{os.getpid()} {UNUSUAL in sys.modules} {os.environ.get('KUBEROLL_TEST', 'unset')} {Path.cwd()} {text}"
    Path(path).write_text(line)


def send(connection: Connection) -> None:
    """Send the process's id."""
    connection.send(os.getpid())


def report_threads(path: str) -> None:
    """Write PyTorch's number of threads."""
    import torch

    Path(path).write_text(str(torch.get_num_threads()))


def wait() -> None:
    """Wait to be killed."""
    import threading

    threading.Event().wait()


def name(title: str) -> None:
    """Give this process a title, and print the one that it has."""
    import psutil
    import setproctitle

    setproctitle.setproctitle(title)
    sys.stdout.write(f"{psutil.Process().cmdline()[0]}\n")
