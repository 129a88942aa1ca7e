"""A policy with several replicas in this process: the server's own parts around an engine that only reads weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from anyio.from_thread import start_blocking_portal

from kuberoll.trainer import PolicyEndpoint
from kuberoll_api.contract import WeightsSource
from kuberoll_api.model.generation import SimulatedEngine
from kuberoll_workers.data.weights.tensors import read_directory
from kuberoll_workers.policy.interface import PolicyUnavailable
from kuberoll_workers.serving.engines.fetching import fetch
from kuberoll_workers.serving.engines.interface import WeightsRefused
from kuberoll_workers.serving.engines.simulated import Simulated
from kuberoll_workers.serving.publications import Publications, VersionTaken
from kuberoll_workers.serving.weights import LiveWeights, WeightsFollower, version_of
from tests.serving.test_publications import Dictionary

TOKEN = "to-publish-with"


class ReadingEngine(Simulated):
    """Reads its weights as vLLM's engine does, from a machine of its own.

    Attributes:
        values: Bits of the tensors that it serves, by name.
        breaks_on: Versions on which it breaks in the middle.
        refuses: Versions that it refuses.
    """

    def __init__(self, scratch: Path) -> None:
        super().__init__(model="none", tokenizer="none", settings=SimulatedEngine(), engine_args={})
        self.scratch = scratch
        self.values: dict[str, list[int]] = {}
        self.breaks_on: set[str] = set()
        self.refuses: set[str] = set()
        self.fetched: list[Path] = []

    async def load_weights(self, uri: str | None, version: str) -> None:
        if uri is not None:
            path = await asyncio.to_thread(fetch, uri, version, self.scratch)
            if version in self.refuses:
                raise WeightsRefused("this replica does not like them")
            self.fetched.append(path)
            self.values = {name: tensor.bits.tolist() for name, tensor in read_directory(path).items()}
        if version in self.breaks_on:
            raise PolicyUnavailable("half of them are loaded")
        await super().load_weights(uri, version)


class Replica:
    """An engine that follows what is published."""

    def __init__(self, publications: Publications, engine: ReadingEngine) -> None:
        self.engine = engine
        self.live = LiveWeights(self.engine, first_wait=0.05)
        self.follower = WeightsFollower(publications, self.live, {})

    @property
    def served(self) -> str:
        return self.live.served_version


class Policy:
    """The policy's `/v1/weights`, with the replicas behind it."""

    def __init__(self, scratch: Path, engine: Callable[[Path], ReadingEngine] = ReadingEngine) -> None:
        self._scratch = scratch
        self._engine = engine
        self._publications = Publications(Dictionary())
        self._portal: Any = None
        self.replicas: dict[str, Replica] = {}
        self.url = ""

    @property
    def endpoint(self) -> PolicyEndpoint:
        return PolicyEndpoint(self.url, TOKEN)

    @property
    def wanted(self) -> str:
        """The version that replicas are to serve."""
        newest = self._publications.newest()
        assert newest is not None
        return version_of(newest.weights)

    def add(self, name: str) -> Replica:
        """Start a replica, which loads the newest weights before it takes requests."""
        started: Replica = self._portal.call(self._start, name)
        return started

    def remove(self, name: str) -> None:
        """Stop a replica."""
        self._portal.call(self.replicas.pop(name).follower.stop)

    @contextmanager
    def serving(self, *names: str) -> Iterator[Policy]:
        with start_blocking_portal() as portal:
            self._portal = portal
            runner = portal.call(self._listen)
            try:
                for name in names:
                    self.add(name)
                yield self
            finally:
                for name in list(self.replicas):
                    self.remove(name)
                portal.call(runner.cleanup)

    async def _start(self, name: str) -> Replica:
        scratch = self._scratch / name
        scratch.mkdir(parents=True, exist_ok=True)
        replica = Replica(self._publications, self._engine(scratch))
        await replica.follower.start(None)
        self.replicas[name] = replica
        return replica

    async def _listen(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/v1/weights", self._show)
        app.router.add_post("/v1/weights", self._change)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
        return runner

    async def _show(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"error": {"type": "x", "message": "no"}}, status=403)
        for replica in self.replicas.values():
            await replica.follower.follow()
        return web.json_response(
            {
                "wanted": self.wanted,
                "replicas": {name: replica.served for name, replica in self.replicas.items()},
                "problems": {
                    name: replica.live.problem
                    for name, replica in self.replicas.items()
                    if replica.live.problem is not None
                },
            }
        )

    async def _change(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read())
        wanted = None if body["uri"] is None else WeightsSource(uri=body["uri"], version=body["version"])
        try:
            self._publications.publish(wanted)
        except VersionTaken as error:
            return web.json_response({"error": {"type": "Conflict", "message": str(error)}}, status=409)
        for replica in self.replicas.values():
            replica.follower.follow_soon()
        return web.json_response({"version": body["version"]}, status=202)
