"""Reception of weights that a trainer offers directly, by vLLM's weight transfer: the replica's side."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from kuberoll_workers.data.weights.offers import (
    HEADER_BYTES,
    Answer,
    Call,
    Hello,
    Method,
    Offer,
    OfferRefused,
    Tensors,
    decode_message,
    encode_message,
    message_length,
)
from kuberoll_workers.serving.engines.checkpoint import Shapes
from kuberoll_workers.serving.engines.gloo_backend import BACKEND as STAGED
from kuberoll_workers.serving.engines.interface import WeightsRefused

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_CONNECT_SECONDS = 10.0
_LOOK_SECONDS = 0.02
# A trainer whose machine is gone closes no connection.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class NotReceived(WeightsRefused):
    """Weights did not come from the trainer; they may be had from files."""


class Transfers(Protocol):
    """vLLM's calls for weights that come from elsewhere, and two for the backend that receives in the background."""

    async def init(self, info: dict[str, Any]) -> None:
        """Join the trainer's group, in place of another."""
        ...

    async def start(self) -> None:
        """Begin an update."""
        ...

    async def update(self, info: dict[str, Any]) -> None:
        """Receive the weights, or begin to receive them in the background."""
        ...

    async def received(self) -> bool:
        """Whether all weights are there that are received in the background."""
        ...

    async def finish(self, version: str) -> None:
        """End the update: the model has the weights."""
        ...

    async def abort(self) -> None:
        """Give up what is received in the background, and leave the group."""
        ...


class VLLMTransfers:
    """Those of vLLM's engine."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine

    async def init(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._engine.shutdown_weight_transfer_engine()
        await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    async def start(self) -> None:
        await self._engine.start_weight_update()

    async def update(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._engine.update_weights(WeightTransferUpdateRequest(update_info=info))

    async def received(self) -> bool:
        return all(await self._engine.collective_rpc("kuberoll_transfer_received"))

    async def finish(self, version: str) -> None:
        await self._engine.finish_weight_update(version)

    async def abort(self) -> None:
        await self._engine.collective_rpc("kuberoll_abort_transfer")


class WeightsReceiver:
    """Receives weights for one engine.

    The backend `gloo` receives while the engine generates, and pauses it only to load what is there: a transfer that
    fails changes nothing. vLLM's own backends write into the model as they receive: the engine is paused all the time,
    and is broken if the transfer fails.
    """

    def __init__(self, transfers: Transfers, *, backend: str, workers: int) -> None:
        """`workers` of the engine receive."""
        self._transfers = transfers
        self._backend = backend
        self._workers = workers
        self._group: str | None = None

    async def receive(
        self,
        offer: Offer,
        *,
        misfit: Callable[[Shapes], str | None],
        switching: Callable[[], AbstractAsyncContextManager[None]],
    ) -> None:
        """Receive what is offered, and have the engine generate with it.

        Args:
            misfit: Says why tensors do not fit the model; None: they do.
            switching: Pauses the engine while its weights change; it is broken if that fails.

        Raises:
            NotReceived: They did not come; the engine keeps its old ones.
            WeightsRefused: They do not fit this model, or that of another replica; the engine keeps its old ones.
            Exception: That of `switching`.
        """
        # Until a transfer has ended well, nobody knows what has become of the group.
        group, self._group = self._group, None
        async with _connected(offer) as trainer:
            await trainer.say(
                Hello(key=offer.key, version=offer.version, backend=self._backend, workers=self._workers, group=group)
            )
            described = await trainer.next("check")
            why = misfit({name: tuple(shape) for name, shape in _named_shapes(described)})
            await trainer.say(Answer(error=why))
            if why is not None:
                raise WeightsRefused(f"the trainer's weights do not fit the model: {why}")
            first = await trainer.next("init_weight_transfer_engine", "start_weight_update")
            if self._backend == STAGED:
                await self._receive_staged(trainer, first, offer.version, switching)
            else:
                async with switching():
                    await self._begin(trainer, first)
                    await self._finish(trainer, offer.version)
            self._group = first.arguments.get("group", group)

    async def _receive_staged(
        self,
        trainer: _Trainer,
        first: Call,
        version: str,
        switching: Callable[[], AbstractAsyncContextManager[None]],
    ) -> None:
        try:
            await self._begin(trainer, first)
            await trainer.next("finish_weight_update")
            await trainer.unless_lost(self._all_received())
        except BaseException as error:
            with contextlib.suppress(Exception):
                await asyncio.shield(self._transfers.abort())
            if isinstance(error, Exception) and not isinstance(error, WeightsRefused):
                raise NotReceived(f"the weights were not received: {type(error).__name__}: {error}") from error
            raise
        async with switching():
            # They are all here: the trainer is no longer needed.
            await self._transfers.finish(version)
        with contextlib.suppress(NotReceived):
            await trainer.say(Answer())

    async def _begin(self, trainer: _Trainer, first: Call) -> None:
        if first.method == "init_weight_transfer_engine":
            await trainer.do(self._transfers.init(first.arguments["init_info"]))
            await trainer.next("start_weight_update")
        await trainer.do(self._transfers.start())
        update = await trainer.next("update_weights")
        await trainer.do(self._transfers.update(update.arguments))

    async def _finish(self, trainer: _Trainer, version: str) -> None:
        await trainer.next("finish_weight_update")
        await trainer.do(self._transfers.finish(version))

    async def _all_received(self) -> None:
        # The worker's thread can set no event of this process.
        while not await self._transfers.received():  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_SECONDS)


class _Trainer:
    """A connection to a trainer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def say(self, message: msgspec.Struct) -> None:
        """
        Raises:
            NotReceived: The trainer is gone.
        """
        try:
            self._writer.write(encode_message(message))
            await self._writer.drain()
        except OSError as error:
            raise NotReceived("the trainer closed the connection") from error

    async def next(self, *expected: Method) -> Call:
        """Wait for the trainer's next call.

        Raises:
            WeightsRefused: It gives up.
            NotReceived: It is gone, or gives up what may be had from files.
        """
        try:
            length = message_length(await self._reader.readexactly(HEADER_BYTES))
            call = decode_message(await self._reader.readexactly(length), Call)
        except (OSError, EOFError) as error:
            raise NotReceived("the trainer closed the connection") from error
        except OfferRefused as error:
            raise NotReceived(str(error)) from error
        if call.method == "refuse":
            kind = NotReceived if call.arguments.get("files", True) else WeightsRefused
            raise kind(str(call.arguments.get("why")))
        if call.method not in expected:
            raise NotReceived(f"the trainer calls {call.method}, where {' or '.join(expected)} was expected")
        return call

    async def do(self, work: Coroutine[Any, Any, None]) -> None:
        """Do what the trainer has called for, and answer.

        Raises:
            NotReceived: The trainer is gone.
            Exception: That of the work.
        """
        try:
            await self.unless_lost(work)
        except Exception as error:
            with contextlib.suppress(NotReceived):
                await self.say(Answer(error=f"{type(error).__name__}: {error}"))
            raise
        await self.say(Answer())

    async def unless_lost(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for work, as long as the trainer is there: it calls nothing else meanwhile.

        Raises:
            NotReceived: It is gone.
        """
        working = asyncio.ensure_future(work)
        listening = asyncio.ensure_future(self._reader.read(1))
        try:
            await asyncio.wait({working, listening}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise NotReceived("the trainer closed the connection in the middle of a transfer")
            working.result()
        finally:
            for task in (working, listening):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                # Its end frees the reader for the next call.
                await listening


@asynccontextmanager
async def _connected(offer: Offer) -> AsyncIterator[_Trainer]:
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(offer.host, offer.port)
    except (OSError, TimeoutError) as error:
        raise NotReceived(
            f"the trainer that offers version {offer.version} at {offer.host}:{offer.port} does not answer: "
            f"{type(error).__name__}: {error}"
        ) from error
    _keep_alive(writer.get_extra_info("socket"))
    try:
        yield _Trainer(reader, writer)
    finally:
        writer.close()


def _keep_alive(connection: Any) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _named_shapes(described: Call) -> list[tuple[str, Any]]:
    try:
        tensors = msgspec.convert(described.arguments, Tensors)
    except msgspec.ValidationError as error:
        raise NotReceived(f"the trainer describes its weights in another way: {error}") from error
    return list(zip(tensors.names, tensors.shapes, strict=True))
