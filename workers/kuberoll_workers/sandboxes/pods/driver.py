"""The driver of sandboxes that are pods."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from kuberoll_api.sandbox_images import is_of_one_machine
from kuberoll_api.sandboxes import (
    IDENTITY_DIRECTORY,
    PLACEMENT_VARIABLE,
    RENEW_SECONDS,
    SANDBOX_PORT,
    WAIT_SECONDS,
    Placement,
    Placements,
    SandboxAnswer,
    SandboxRequest,
    WorkerSandboxes,
)
from kuberoll_workers.data.causes import Evidence
from kuberoll_workers.data.extras import installation
from kuberoll_workers.sandboxes.connection import Ticket, connect
from kuberoll_workers.sandboxes.driver import Ending, SandboxSpec
from kuberoll_workers.sandboxes.errors import SandboxError, SandboxLost, SandboxUnavailable
from kuberoll_workers.sandboxes.guest.settings import Settings
from kuberoll_workers.sandboxes.keys import Key, context_of, make_key
from kuberoll_workers.sandboxes.places import make_places
from kuberoll_workers.sandboxes.pods.client import BrokerClient, BrokerUnreachable
from kuberoll_workers.sandboxes.runtime import Runtime

_IDENTITY: Final = f"{IDENTITY_DIRECTORY}/user"
# Kubernetes' default; the broker reads it.
_TERMINATION: Final = "/dev/termination-log"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
# One who is told that the container runs may be faster than its server.
_ATTEMPT_SECONDS: Final = 2.0
_FIRST_SECONDS: Final = 60.0
# Most have started by then; what the others wait for is known, however short their time is.
_FIRST_WAIT: Final = 5.0
# The kubelet tells of a container's end a moment after its connections break.
_NEWS_SECONDS: Final = 3.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Ready:
    """What a driver needs once it has started."""

    client: BrokerClient
    key: Key
    context: ssl.SSLContext
    renewing: asyncio.Task[None]


class PodDriver:
    """Makes sandboxes that are pods of the job, by the broker.

    Args:
        environment: Name of the environment that they are for.
        variables: The variables that tell where the broker is; None: this process's.
    """

    def __init__(self, *, environment: str, variables: Mapping[str, str] | None = None) -> None:
        self._environment, self._variables = environment, os.environ if variables is None else variables
        placements = Placements.model_validate_json(self._variables.get(PLACEMENT_VARIABLE) or "{}")
        self._placement = placements.root.get(environment, Placement())
        # Of all processes that this pod's name may ever have.
        host = re.sub("[^-.a-z0-9]", "-", socket.gethostname().lower())[-48:].strip("-.")
        self._worker = f"{host or 'worker'}-{secrets.token_hex(4)}"
        self._starting = asyncio.Lock()
        self._ready: _Ready | None = None
        self._names: set[str] = set()

    async def check(self) -> None:
        """See `Driver.check`."""
        ready = await self._started()
        pause, end = _FIRST_PAUSE, time.monotonic() + _FIRST_SECONDS
        while True:
            try:
                await ready.client.check()
                return
            except BrokerUnreachable as error:
                # One that is being replaced is there again in a moment.
                if time.monotonic() > end:
                    raise SandboxUnavailable(str(error)) from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def refusal(self, spec: SandboxSpec) -> str | None:
        """See `Driver.refusal`."""
        if is_of_one_machine(spec.image):
            return (
                f"{spec.image} is of one machine, and pods pull their images from registries: push one, and name it as "
                "HOST/NAME:TAG in the task, or in environments[].sandbox.image"
            )
        return None

    async def prepare(self, image: str) -> None:
        """See `Driver.prepare`; nodes pull images when they need them."""

    async def create(self, name: str, spec: SandboxSpec) -> Ticket:
        """See `Driver.create`."""
        if (reason := self.refusal(spec)) is not None:
            raise SandboxUnavailable(reason)
        ready = await self._started()
        self._names.add(name)
        said = _Said("the broker has not answered")
        try:
            try:
                async with asyncio.timeout(spec.start_seconds):
                    return await self._create(ready, name, spec, said)
            except TimeoutError as error:
                raise SandboxUnavailable(
                    f"the sandbox {name} of {spec.image} did not start within {spec.start_seconds:g} s: {said.text}"
                ) from error
        except BaseException:
            await asyncio.shield(self._undo(name))
            raise

    async def ending(self, name: str) -> Ending | None:
        """See `Driver.ending`."""
        if self._ready is None:
            return None
        try:
            answer = await self._ready.client.ending(name, wait=_NEWS_SECONDS)
        except (BrokerUnreachable, SandboxUnavailable):
            return None
        if answer.state == "Running":
            # A node that is gone is noticed later.
            return Ending("its pod seems to run")
        return Ending(answer.reason, Evidence(event=answer.event or None))

    async def remove(self, name: str) -> None:
        """See `Driver.remove`."""
        if self._ready is None:
            return
        try:
            await self._ready.client.release(name)
        except (BrokerUnreachable, SandboxUnavailable) as error:
            # As this worker no longer names it, the broker removes it when it is there again.
            raise SandboxError(f"its pod is removed later: {error}") from error
        finally:
            self._names.discard(name)

    async def close(self) -> None:
        """See `Driver.close`."""
        ready = self._ready
        if ready is None:
            return
        for error in await asyncio.gather(*map(self.remove, list(self._names)), return_exceptions=True):
            if isinstance(error, Exception):
                _log.warning("a sandbox is left until its lease ends: %s", error)
        self._ready = None
        ready.renewing.cancel()
        await asyncio.wait((ready.renewing,))
        await ready.client.close()

    async def _started(self) -> _Ready:
        async with self._starting:
            if self._ready is None:
                client = BrokerClient.of(self._variables)
                try:
                    key = await asyncio.to_thread(make_key)
                except ImportError as error:
                    raise SandboxUnavailable(f"sandboxes need cryptography: {installation('cryptography')}") from error
                self._ready = _Ready(client, key, context_of(key), asyncio.create_task(self._renew(client)))
            return self._ready

    async def _create(self, ready: _Ready, name: str, spec: SandboxSpec, said: _Said) -> Ticket:
        try:
            request = self._request(ready, name, spec)
        except ValidationError as error:
            [first, *_] = error.errors(include_url=False)
            raise SandboxUnavailable(
                f"the sandbox {name} of {spec.image[:100]} cannot be a pod: {'.'.join(map(str, first['loc']))}: "
                f"{first['msg']}"
            ) from error
        address = await self._address(ready, name, request, said)
        ticket = Ticket(
            name=name, address=f"tcp:{address}", certificate=ready.key.certificate, private=ready.key.private
        )
        pause = _FIRST_PAUSE
        while True:
            try:
                (await connect(ticket, ready.context, seconds=_ATTEMPT_SECONDS)).close()
                break
            except SandboxLost as error:
                said.text = f"its pod runs, and its server at {address} does not answer: {error}"
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            # Its container may have ended meanwhile.
            await self._address(ready, name, request, said)
        await make_places(ticket)
        return ticket

    async def _address(self, ready: _Ready, name: str, request: SandboxRequest, said: _Said) -> str:
        """Where the server of a sandbox is, once its pod runs."""
        pause, wait = _FIRST_PAUSE, _FIRST_WAIT
        while True:
            began = time.monotonic()
            try:
                answer = await ready.client.want(name, request, wait=wait)
            except BrokerUnreachable as error:
                said.text = str(error)
            else:
                wait = WAIT_SECONDS
                if (address := _decided(name, request.image, answer)) is not None:
                    return address
                if answer.reason != said.text:
                    said.text = answer.reason
                    _log.info("the sandbox %s of %s waits: %s", name, request.image, answer.reason)
                if time.monotonic() - began > _LONGEST_PAUSE:
                    # It has waited for something to say, and does so again.
                    pause = _FIRST_PAUSE
                    continue
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _request(self, ready: _Ready, name: str, spec: SandboxSpec) -> SandboxRequest:
        settings = Settings(
            name=name,
            certificate=ready.key.certificate,
            port=SANDBOX_PORT,
            user=spec.user,
            workdir=spec.workdir,
            environment=dict(spec.environment),
            of_the_image=True,
            identity=None if spec.user else _IDENTITY,
            lease_seconds=spec.lease_seconds,
            # Its driver comes as soon as it listens, unless that was killed.
            start_seconds=min(spec.start_seconds, max(spec.lease_seconds, _FIRST_SECONDS)),
            total_seconds=spec.total_seconds,
        )
        return SandboxRequest(
            environment=self._environment,
            worker=self._worker,
            image=spec.image,
            command=Runtime.argv(),
            variables=Runtime.environment(settings),
            identify=[] if spec.user else [*Runtime.identification(), _IDENTITY, _TERMINATION],
            cpus=spec.cpus,
            memory=spec.memory,
            storage=spec.storage,
            network=spec.network,
            read_only=spec.read_only,
            placement=self._placement,
            lease_seconds=spec.lease_seconds,
            start_seconds=spec.start_seconds,
            total_seconds=spec.total_seconds,
        )

    async def _undo(self, name: str) -> None:
        with contextlib.suppress(SandboxError):
            await self.remove(name)

    async def _renew(self, client: BrokerClient) -> None:
        said = ""
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            try:
                await client.renew(self._worker, WorkerSandboxes(names=sorted(self._names)))
                said = ""
            except Exception as error:
                # Sandboxes go on without it for a while; whatever it is, the next time may be another.
                if str(error) != said:
                    said = str(error)
                    _log.warning("%s", error)


class _Said:
    """What was last heard of a sandbox that starts."""

    def __init__(self, text: str) -> None:
        self.text = text


def _decided(name: str, image: str, answer: SandboxAnswer) -> str | None:
    """The address of a sandbox; None while it waits.

    Raises:
        SandboxUnavailable: There will be none.
        SandboxLost: It is gone.
    """
    if answer.state == "Running":
        assert answer.address is not None
        return answer.address
    if answer.state == "Refused":
        raise SandboxUnavailable(f"the sandbox {name} of {image} cannot be made: {answer.reason}")
    if answer.state == "Ended":
        raise SandboxLost(f"the sandbox {name} ended while it started: {answer.reason}")
    return None
