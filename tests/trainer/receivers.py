"""Engines that receive weights directly, as vLLM's workers do, without vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from kuberoll_workers.data.weights.offers import Tensors, offer_of
from kuberoll_workers.data.weights.tensors import UnusableWeights
from kuberoll_workers.policy.interface import PolicyUnavailable
from kuberoll_workers.serving.engines.gloo_receiver import GlooInitInfo, GlooReceiver
from kuberoll_workers.serving.engines.interface import WeightsRefused
from kuberoll_workers.serving.engines.receiving import NotReceived, WeightsReceiver
from tests.trainer.policies import ReadingEngine


class Workers:
    """The workers of an engine: the part that receives.

    Attributes:
        values: Bytes of the tensors that they have loaded, by name.
        joined: Ranks and sizes of the groups that they were told to join.
    """

    def __init__(self, count: int, *, in_place: bool = False) -> None:
        """`in_place`: as vLLM's own backends, which return from `update` when the weights are there."""
        self._in_place = in_place
        self._receivers = [GlooReceiver(rank) for rank in range(count)]
        self.values: dict[str, list[int]] = {}
        self.joined: list[tuple[int, int]] = []
        self.aborted = 0

    async def init(self, info: dict[str, Any]) -> None:
        found = GlooInitInfo(**info)
        self.joined.append((found.rank_offset, found.world_size))
        for receiver in self._receivers:
            receiver.join(found)

    async def start(self) -> None:
        return None

    async def update(self, info: dict[str, Any]) -> None:
        for receiver in self._receivers:
            receiver.update(Tensors(**info))
        while self._in_place and not await self.received():  # noqa: ASYNC110 - a thread sets no event of this loop
            await asyncio.sleep(0)

    async def received(self) -> bool:
        return all(receiver.done() for receiver in self._receivers)

    async def finish(self, version: str) -> None:
        found = [
            {name: tensor.reshape(-1).view(torch.uint8).tolist() for name, tensor in receiver.take()}
            for receiver in self._receivers
        ]
        assert all(one == found[0] for one in found)
        self.values = found[0]

    async def abort(self) -> None:
        self.aborted += 1
        for receiver in self._receivers:
            receiver.abort()


class ReceivingEngine(ReadingEngine):
    """Receives what is offered, and reads files where that fails.

    Attributes:
        receives: False: as an engine whose `weight_transfer_config` is not set.
    """

    def __init__(self, scratch: Path, workers: int = 1, backend: str = "gloo") -> None:
        super().__init__(scratch)
        self.workers = Workers(workers, in_place=backend != "gloo")
        self.receives = True
        self._receiver = WeightsReceiver(self.workers, backend=backend, workers=workers)
        self.pauses = 0

    async def load_weights(self, uri: str | None, version: str) -> None:
        offer = None if uri is None else offer_of(uri)
        if offer is None:
            await super().load_weights(uri, version)
            return
        try:
            if not self.receives:
                raise NotReceived("weight_transfer_config is not set")
            await self._receiver.receive(
                offer,
                misfit=lambda _: "this replica does not like them" if version in self.refuses else None,
                switching=lambda: self._switching(version),
            )
        except NotReceived as refused:
            if offer.files is None:
                raise
            try:
                await super().load_weights(offer.files, version)
            except (WeightsRefused, UnusableWeights):
                # vLLM's engine looks whether there are any.
                raise refused from None

    @asynccontextmanager
    async def _switching(self, version: str) -> AsyncIterator[None]:
        self.pauses += 1
        try:
            yield
        except Exception as error:
            raise PolicyUnavailable(str(error)) from error
        if version in self.breaks_on:
            raise PolicyUnavailable("half of them are loaded")
        self.values = self.workers.values
        await super(ReadingEngine, self).load_weights(None, version)
