"""What a trajectory's machine costs: its start, an action in it beside the action itself, and the memory of its server.

    .venv/bin/python -m benchmarks.sandboxes

The image is one of busybox, which this program writes itself. An action is `/bin/true`; beside it stands the same
program started by `subprocess` on this machine, in turns, so that both meet the same load.
"""

from __future__ import annotations

import asyncio
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from benchmarks.figures import Figure
from kuberoll_workers.environments import process_tree
from kuberoll_workers.sandboxes.driver import SandboxSpec
from kuberoll_workers.sandboxes.leases import Sandboxes
from kuberoll_workers.sandboxes.namespaces.driver import NamespaceDriver
from tests.sandboxes.layouts import busybox_layout

ACTIONS = 200
STARTS = 30
PARALLEL = 16


async def measured(directory: Path) -> dict[str, list[float]]:
    """Milliseconds of everything that is measured, and MiB of the server's memory."""
    found: dict[str, list[float]] = {}
    driver = NamespaceDriver(cache=directory / "cache", scratch=directory)
    sandboxes = Sandboxes(driver)
    spec = SandboxSpec(image=busybox_layout(directory / "image"))
    try:
        began = time.perf_counter()
        async with sandboxes.lease(spec):
            # With the runtime and the image's unpacking.
            found["first start"] = [(time.perf_counter() - began) * 1e3]
        found["start"] = []
        for _ in range(STARTS):
            async with sandboxes.lease(spec) as lease:
                found["start"].append(lease.start_seconds * 1e3)

        async def start() -> float:
            async with sandboxes.lease(spec) as lease:
                return lease.start_seconds * 1e3

        found[f"start, {PARALLEL} at once"] = await asyncio.gather(*(start() for _ in range(PARALLEL)))
        async with sandboxes.lease(spec) as lease:
            box = lease.sandbox
            await box.write("/work/file", b"x" * 10_000)

            async def program() -> None:
                await asyncio.to_thread(subprocess.run, ["/bin/true"], check=True)

            async def command() -> None:
                await box.exec(["/bin/true"])

            async def read() -> None:
                await box.read("/work/file")

            async def write() -> None:
                await box.write("/work/file", b"x" * 10_000)

            found |= await in_turns(
                {"subprocess": program, "exec": command, "read 10 kB": read, "write 10 kB": write}, ACTIONS
            )
            assert driver._process is not None
            pss = [process_tree.proportional(pid) / 2**20 for pid in process_tree.descendants(driver._process.pid)]
            found["server's memory (PSS of anonymous pages, MiB)"] = [sum(pss)]
    finally:
        await sandboxes.close()
    return found


async def in_turns(actions: dict[str, Callable[[], Awaitable[None]]], count: int) -> dict[str, list[float]]:
    """Milliseconds of each action, one after the other, over and over."""
    found: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(count):
        for name, action in actions.items():
            began = time.perf_counter()
            await action()
            found[name].append((time.perf_counter() - began) * 1e3)
    return found


def figures() -> Iterator[Figure]:
    """See `benchmarks.run`."""
    with tempfile.TemporaryDirectory() as directory:
        found = asyncio.run(measured(Path(directory)))
    yield Figure("start of a sandbox", statistics.median(found["start"]), "ms")
    program = statistics.median(found["subprocess"])
    yield Figure("action in a sandbox", statistics.median(found["exec"]), "ms", baseline=program, goal=program + 3.0)


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        found = asyncio.run(measured(Path(directory)))
    print(f"{platform.processor() or platform.machine()}, Linux {platform.release()}")
    for name, values in found.items():
        ordered = sorted(values)
        p95 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))]
        print(f"{name:<50} p50 {statistics.median(values):8.2f}  p95 {p95:8.2f}")
    overhead = statistics.median(found["exec"]) - statistics.median(found["subprocess"])
    print(f"an action's own overhead at the median: {overhead:.2f} ms")


if __name__ == "__main__":
    main()
