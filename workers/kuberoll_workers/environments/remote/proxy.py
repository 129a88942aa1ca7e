"""An environment on servers, for checking jobs, generating rows and computing its metrics; without an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar

import orjson

from kuberoll_workers.environments import messages
from kuberoll_workers.environments.interface import ChatMessage, EnvironmentReturn, Metadata
from kuberoll_workers.environments.isolation import RemoteEnvironment
from kuberoll_workers.environments.outcome import EnvironmentFault, StepRaised
from kuberoll_workers.environments.registry import UnusableEnvironment
from kuberoll_workers.environments.remote import protocol
from kuberoll_workers.environments.remote.addresses import UrlAddresses
from kuberoll_workers.environments.remote.replica import ConnectionLost, Replica

CALL_SECONDS: Final = 900.0
"""Time limit of one call."""
_PAUSE_SECONDS: Final = 1.0
# Token ids of prompts are many, and no use to somebody who has no tokenizer.
_NOT_SENT: Final = frozenset({"prompt_token_ids"})

_Value = TypeVar("_Value")


class ServerProxy(RemoteEnvironment):
    """Proxy of an environment on servers."""

    def __init__(self, name: str, urls: Sequence[str], *, token: str | None, patience: float) -> None:
        """Ask the servers for the environment.

        Args:
            patience: Time to wait until one of them answers, in seconds.

        Raises:
            UnusableEnvironment: None answers, or the environment cannot be created there.
        """
        self._name = name
        self._urls = urls
        self._token = token
        self._patience = patience
        try:
            info = self._answer("GET", "info", b"", lambda data: messages.decode_answer(data, protocol.Info))
        except EnvironmentFault as fault:
            raise UnusableEnvironment(f"environment {name!r}: {fault}", fault.traceback) from fault
        if info.protocol != protocol.VERSION:
            raise UnusableEnvironment(
                f"environment {name!r}: its server speaks version {info.protocol} of the protocol; "
                f"this is {protocol.VERSION}"
            )
        self.hooks, self.digest = info.hooks, info.digest

    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
        """The environment's rows.

        Raises:
            EnvironmentFault: The environment has no generator, or it failed.
        """
        body = messages.encode(messages.RowsRequest(count, seed))
        return self._answer("POST", messages.GENERATE_DATASET, body, messages.decode_rows)

    def step(self, message_log_batch: list[list[ChatMessage]], metadata: list[Metadata]) -> EnvironmentReturn:
        raise NotImplementedError("steps run in a RemoteExecutor")

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """The environment's own metrics, computed by a server.

        Raises:
            EnvironmentFault: It failed, or the columns are too large to be sent.
        """
        columns: Mapping[str, Any] = {name: batch[name] for name in batch if name not in _NOT_SENT}
        try:
            body = messages.encode(messages.PostProcessRequest(messages.raw(orjson.dumps(columns, default=list))))
        except TypeError as error:
            raise StepRaised(f"global_post_process_and_metrics: the trajectories could not be sent: {error}") from error
        return batch, orjson.loads(self._answer("POST", messages.POST_PROCESS, body, messages.decode_metrics))

    def _answer(self, method: str, path: str, body: bytes, read: Callable[[bytes], _Value]) -> _Value:
        status, data = _alone(self._ask(method, f"{protocol.PREFIX}/{path}", body))
        try:
            if status == protocol.STATUS_FAULT:
                raise messages.decode_fault(data)
            if status != 200:
                text = " ".join(data[:500].decode("utf-8", "replace").split())
                raise StepRaised(f"{path}: {self._urls[0]} answered {status}: {text or 'nothing'}")
            return read(data)
        except messages.InvalidMessage as error:
            raise StepRaised(f"{path}: the environment's server violates its protocol: {error}") from error

    async def _ask(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """The answer of the first server that answers."""
        source = UrlAddresses(self._urls)
        loop = asyncio.get_running_loop()
        deadline, trouble = loop.time() + self._patience, "none is listed"
        while True:
            for address in await source.addresses():
                replica = Replica(address, token=self._token)
                try:
                    async with asyncio.timeout(CALL_SECONDS):
                        if method == "GET":
                            status, data = await replica.get(path)
                        else:
                            status, data = await replica.post(path, body, seconds=CALL_SECONDS)
                    if status != protocol.STATUS_BUSY:
                        return status, data
                    trouble = f"{address.url}: busy"
                except (ConnectionLost, TimeoutError, messages.InvalidMessage) as error:
                    trouble = str(error) or f"{address.url}: no answer for {CALL_SECONDS:g} s"
                finally:
                    await replica.close()
            if loop.time() >= deadline:
                raise StepRaised(f"no server of the environment answers at {', '.join(self._urls)}: {trouble}")
            await asyncio.sleep(_PAUSE_SECONDS)


def _alone(work: Coroutine[Any, Any, _Value]) -> _Value:
    """Run a coroutine in a thread of its own: the caller's may have an event loop."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
