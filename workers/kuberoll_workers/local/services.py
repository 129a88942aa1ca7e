"""The further served models of a run on this machine: a server of vLLM's for each of `spec.services`."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kuberoll_api.model.services import ModelService
from kuberoll_workers.environments.served_models import ServedModel
from kuberoll_workers.local.generation import RunFailed, StartClock, literal_variables, while_serving
from kuberoll_workers.local.preflight import ModelSource
from kuberoll_workers.local.processes import Child, see_log
from kuberoll_workers.serving.vllm_server import HEALTH, KEY_VARIABLE, serve_arguments

if TYPE_CHECKING:
    import aiohttp

POLL_SECONDS = 0.25
_ANSWER_SECONDS = 5.0
_HOST = "127.0.0.1"


class ServiceProcess:
    """The server of one service, as a child process."""

    def __init__(self, child: Child, name: str, endpoint: ServedModel) -> None:
        self._child = child
        self.name = name
        self.endpoint = endpoint

    @classmethod
    async def start(
        cls,
        service: ModelService,
        source: ModelSource,
        *,
        port: int,
        scratch: Path,
        log: Path,
        environment: Mapping[str, str],
    ) -> Self:
        """Start the process; it is not ready yet.

        Args:
            source: Its model on this machine.
            scratch: The run's scratch directory.
            environment: Additional environment variables.
        """
        key = secrets.token_hex(32)
        child = await Child.start(
            "kuberoll_workers.serving.vllm_server",
            serve_arguments(service, host=_HOST, port=port, model=source.model, tokenizer=source.tokenizer),
            log=log,
            environment={
                **environment,
                "TMPDIR": str(scratch),
                KEY_VARIABLE: key,
                **literal_variables(service.env),
            },
            reports=False,
        )
        return cls(child, service.name, ServedModel(url=f"http://{_HOST}:{port}/v1", token=key))

    async def ready(self, clock: StartClock, *, deadline: float) -> None:
        """Wait until it can be asked.

        Args:
            deadline: Maximum time to wait, seconds.

        Raises:
            RunFailed: It has ended, or was not ready in time.
        """
        phase = f"service {self.name}"
        clock.begin(phase)
        try:
            async with asyncio.timeout(deadline), clock.ticking():
                await while_serving(self, self._answers())
        except TimeoutError as error:
            raise RunFailed(
                f"the service {self.name} was not ready within spec.startupDeadlineSeconds ({deadline:g} s); "
                f"see {self._child.log}"
            ) from error
        clock.finish(phase, clock.elapsed)

    async def _answers(self) -> None:
        import aiohttp

        url = self.endpoint.url.removesuffix("/v1") + HEALTH
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_SECONDS)) as session:
            while True:
                if await _is_healthy(session, url):
                    return
                await asyncio.sleep(POLL_SECONDS)

    async def ended(self) -> str:
        """Wait until the process ends; return the message for the user."""
        code = await self._child.wait()
        return f"the service {self.name} ended unexpectedly (exit code {code}); {see_log(self._child.log)}"

    def terminate(self) -> None:
        """Begin to end it."""
        self._child.signal(signal.SIGTERM)

    async def stop(self, patience: float) -> None:
        """End it; kill it after `patience` seconds."""
        await self._child.stop(patience)


async def start_services(
    services: Sequence[ModelService],
    sources: Sequence[ModelSource],
    *,
    scratch: Path,
    logs: Path,
    environment: Mapping[str, str],
) -> list[ServiceProcess]:
    """Start a server for each service; see `ServiceProcess.start`.

    Args:
        logs: Directory of their logs.
    """
    from kuberoll_workers.serving.ray_settings import free_ports

    ports = free_ports(len(services))
    return [
        await ServiceProcess.start(
            service,
            source,
            port=port,
            scratch=scratch,
            log=logs / f"service-{service.name}.log",
            environment=environment,
        )
        for service, source, port in zip(services, sources, ports, strict=True)
    ]


async def _is_healthy(session: aiohttp.ClientSession, url: str) -> bool:
    import aiohttp

    try:
        async with session.get(url) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
