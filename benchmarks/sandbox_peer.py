"""A sandbox in a container beside a peer's: mini-swe-agent's, which most agents of repositories are played with.

    .venv/bin/python -m benchmarks.sandbox_peer

Both use one engine (Podman) and one image, and take turns, so that both meet the same load. The peer starts `podman
run` for a machine and `podman exec` for each action; ours speaks the engine's API for a machine, and its own server
inside for actions. An action is `true`, by the image's shell in both.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import statistics
import tempfile
import time
from pathlib import Path

from minisweagent.environments.docker import DockerEnvironment

from kuberoll_workers.sandboxes.containers.driver import DockerDriver
from kuberoll_workers.sandboxes.driver import SandboxSpec
from kuberoll_workers.sandboxes.leases import Sandboxes
from tests.sandboxes.engines import Podman, running
from tests.sandboxes.layouts import busybox_layout

STARTS = 20
ACTIONS = 60


def wrapper(engine: Podman, directory: Path) -> Path:
    """A program that is podman for this engine."""
    path = directory / "podman"
    own = ("CONTAINERS_CONF", "CONTAINERS_REGISTRIES_CONF")
    variables = [f"{name}={text}" for name, text in engine.variables().items() if name in own]
    path.write_text(f'#!/bin/sh\nexec {shlex.join(["env", *variables, *engine.podman()])} "$@"\n')
    path.chmod(0o755)
    return path


async def measured(directory: Path) -> dict[str, list[float]]:
    """Milliseconds of starts and actions, ours and the peer's."""
    found: dict[str, list[float]] = {name: [] for name in ("start", "peer's start", "action", "peer's action")}
    with running(Podman, directory / "engine") as engine:
        assert isinstance(engine, Podman)
        layout = busybox_layout(directory / "image")
        sandboxes = Sandboxes(
            DockerDriver(cache=directory / "cache", variables={"DOCKER_HOST": engine.url, "TMPDIR": str(directory)})
        )
        try:
            spec = SandboxSpec(image=layout)
            async with sandboxes.lease(spec):
                # The image is loaded, and the runtime is made.
                [image] = engine.run("images", "--format", "{{.Repository}}:{{.Tag}}").split()

            def peer() -> DockerEnvironment:
                return DockerEnvironment(
                    image=image,
                    executable=str(wrapper(engine, directory)),
                    run_args=["--rm", "--network=none"],
                    interpreter=["/bin/sh", "-c"],
                    logger=logging.getLogger("peer"),
                )

            for _ in range(STARTS):
                async with sandboxes.lease(spec) as lease:
                    found["start"].append(lease.start_seconds * 1e3)
                began = time.perf_counter()
                other = await asyncio.to_thread(peer)
                found["peer's start"].append((time.perf_counter() - began) * 1e3)
                engine.run("rm", "--force", "--time=0", other.container_id)
                # It would remove it once more when it is forgotten.
                other.container_id = None
            other = await asyncio.to_thread(peer)
            async with sandboxes.lease(spec) as lease:
                for _ in range(ACTIONS):
                    began = time.perf_counter()
                    await lease.sandbox.exec("true")
                    found["action"].append((time.perf_counter() - began) * 1e3)
                    began = time.perf_counter()
                    answer = await asyncio.to_thread(other.execute, {"command": "true"})
                    found["peer's action"].append((time.perf_counter() - began) * 1e3)
                    assert answer["returncode"] == 0, answer
            engine.run("rm", "--force", "--time=0", other.container_id)
            other.container_id = None
        finally:
            await sandboxes.close()
    return found


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kr-") as directory:
        found = asyncio.run(measured(Path(directory)))
    for name, values in found.items():
        ordered = sorted(values)
        p95 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))]
        print(f"{name:<16} p50 {statistics.median(values):8.2f} ms  p95 {p95:8.2f} ms")
    for name in ("start", "action"):
        ratio = statistics.median(found[f"peer's {name}"]) / statistics.median(found[name])
        print(f"{name}: the peer's takes {ratio:.1f} times as long")


if __name__ == "__main__":
    main()
