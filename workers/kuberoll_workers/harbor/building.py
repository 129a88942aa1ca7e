"""Building of the images that tasks need, before any rollout: each once, and again only when its context changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kuberoll_workers.harbor.builders import Builder, BuildError, has_written
from kuberoll_workers.harbor.images import Build, tagged

Outcome = Literal["built", "there", "broken"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where images go.

    Attributes:
        prefix: Their name without a tag.
        push: To the registry that the prefix names.
        layout: Into this OCI layout; None: into none. With neither, they stay in the builder's own store.
    """

    prefix: str
    push: bool = False
    layout: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What became of a build.

    Attributes:
        outcome: `there`: nothing was to be done.
        seconds: Time that it took.
        problem: Why it has failed.
    """

    build: Build
    reference: str
    outcome: Outcome
    seconds: float
    problem: str | None = None


async def build_images(
    builds: Sequence[Build], builder: Builder, target: Target, *, parallel: int = 1, done: Callable[[Built], None]
) -> None:
    """Build images and bring them where they shall be; a failure does not end the others.

    Args:
        parallel: Number of builds at a time.
        done: Called with each as it ends.
    """
    places = asyncio.Semaphore(parallel)
    # Each that adds to a layout writes its index anew.
    index = asyncio.Lock()

    async def build(one: Build) -> None:
        async with places:
            done(await _build(one, builder, target, index))

    async with asyncio.TaskGroup() as group:
        for one in builds:
            group.create_task(build(one))


async def _build(build: Build, builder: Builder, target: Target, index: asyncio.Lock) -> Built:
    reference, begin = tagged(target.prefix, build.digest), time.monotonic()
    outcome: Outcome = "there"
    problem = None
    try:
        if not await _is_there(reference, builder, target):
            outcome = "built"
            if not await builder.has(reference):
                await builder.build(build.context, reference, build.timeout)
            if target.push:
                await builder.push(reference, build.timeout)
            if target.layout is not None:
                async with index:
                    await builder.write(reference, target.layout, build.timeout)
    except BuildError as error:
        outcome, problem = "broken", str(error)
    return Built(build=build, reference=reference, outcome=outcome, seconds=time.monotonic() - begin, problem=problem)


async def _is_there(reference: str, builder: Builder, target: Target) -> bool:
    if target.layout is not None:
        return has_written(target.layout, reference)
    return await (builder.has_pushed(reference) if target.push else builder.has(reference))
