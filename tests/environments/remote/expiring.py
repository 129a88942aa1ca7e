"""`kuberoll env serve` of an environment with a directory, whose episodes expire after other times than an hour."""

from __future__ import annotations

import argparse
import asyncio
import sys

from kuberoll_workers.environments.process_access import ProcessAccess
from kuberoll_workers.environments.registry import PlainSpec
from kuberoll_workers.environments.remote.serving import Serving, serve


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("entrypoint")
    parser.add_argument("--port", type=int)
    parser.add_argument("--directory")
    parser.add_argument("--idle-seconds", type=float)
    given = parser.parse_args()
    spec = PlainSpec(name="rooms", type=None, entrypoint=given.entrypoint, config={"directory": given.directory})
    access = ProcessAccess(writable=[given.directory])

    def ready(url: str) -> None:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()

    asyncio.run(serve(Serving(spec=spec, access=access, port=given.port, idle_seconds=given.idle_seconds), ready))


if __name__ == "__main__":
    main()
