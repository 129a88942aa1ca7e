"""Pod of an environment with isolation Remote: serves it over HTTP.

python -m kuberoll_workers.pods.environment --config FILE [--claimed]

With --claimed, in a sandbox of a warm pool, the file gets its content when the sandbox is claimed.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path

import msgspec

from kuberoll_api.contract import ENVIRONMENT_PORT, ENVIRONMENT_TOKEN, EnvironmentPodConfig
from kuberoll_api.logs import log_to_stderr
from kuberoll_workers.environments.outcome import EnvironmentFault
from kuberoll_workers.environments.process_access import ProcessAccess
from kuberoll_workers.environments.registry import PlainSpec, UnusableEnvironment
from kuberoll_workers.environments.remote.serving import Serving, serve
from kuberoll_workers.pods.claim import wait_for_claim
from kuberoll_workers.pods.exit_codes import exit_status
from kuberoll_workers.pods.files import ConfigRefused, clip, write_termination_message

_log = logging.getLogger(__name__)


def read_config(path: Path) -> EnvironmentPodConfig:
    """Read the pod's configuration.

    Raises:
        ConfigRefused: It is missing or invalid.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=EnvironmentPodConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigRefused(f"{path}: {error}") from error


def serving_of(config: EnvironmentPodConfig, *, token: str | None, host: str) -> Serving:
    """The server of a configuration.

    Raises:
        ConfigRefused: There is neither a token nor the digest of one.
    """
    if not token and not config.token_digest:
        raise ConfigRefused(f"the variable {ENVIRONMENT_TOKEN} is not set: the server needs its token")
    spec = PlainSpec(name=config.name, type=config.type, entrypoint=config.entrypoint, config=config.config)
    return Serving(
        spec=spec,
        access=ProcessAccess(
            readable=config.readable_paths, writable=config.writable_paths, variables=config.variables
        ),
        host=host,
        port=ENVIRONMENT_PORT,
        processes=config.processes,
        spare=config.spare_processes,
        token=token or None,
        token_digest=config.token_digest,
        timeout=config.step_timeout_seconds,
    )


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="kuberoll_workers.pods.environment", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="JSON file of an EnvironmentPodConfig")
    parser.add_argument("--claimed", action="store_true", help="wait until the file has content")
    arguments = parser.parse_args()
    host = os.environ.get("POD_IP") or "0.0.0.0"
    try:
        if arguments.claimed and not asyncio.run(wait_for_claim(arguments.config, host=host, port=ENVIRONMENT_PORT)):
            return
        config = read_config(arguments.config)
        log_to_stderr(job=config.job)
        if config.modules is not None:
            sys.path.insert(0, config.modules)
        token = os.environ.pop(ENVIRONMENT_TOKEN, None)
        serving = serving_of(config, token=token, host=host)
        try:
            asyncio.run(serve(serving, lambda url: _log.info("environment %s at %s", config.name, url)))
        except EnvironmentFault as fault:
            # The process's own fault says whether it is lasting.
            own = fault.__cause__ if isinstance(fault.__cause__, EnvironmentFault) else fault
            raise UnusableEnvironment(str(fault), fault.traceback) from own
    except Exception as error:
        code, cause = exit_status(error)
        _log.exception("the environment cannot be served")
        write_termination_message(clip(cause).encode())
        sys.exit(code)


if __name__ == "__main__":
    main()
