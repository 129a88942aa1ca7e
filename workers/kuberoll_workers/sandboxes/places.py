"""Directories that commands need, and images of few files lack."""

from __future__ import annotations

import contextlib

from kuberoll_workers.sandboxes.connection import Ticket
from kuberoll_workers.sandboxes.handle import Sandbox


async def make_places(ticket: Ticket) -> None:
    """Make the working directory of a sandbox's commands, and /tmp, if they are missing.

    Raises:
        SandboxLost: It is gone.
    """
    sandbox = Sandbox(ticket)
    try:
        for place, mode in sorted({await sandbox.workdir(): 0o755, "/tmp": 0o1777}.items()):
            try:
                await sandbox.read(place, size=0, user="0")
            except FileNotFoundError:
                with contextlib.suppress(OSError):
                    await sandbox.make_directory(place, mode=mode, user="0")
            except OSError:
                # It is there, and no file.
                continue
    finally:
        await sandbox.close()
