"""Images of tasks' machines: names by the digest of what they are built from, so that rollouts find and never build."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kuberoll_workers.harbor.task import Machine, Task

_DIGITS: Final = 32
# A name without a tag; a registry may have a port.
_PREFIX = re.compile(r"[a-z0-9]([a-zA-Z0-9.-]*(:[0-9]+)?/)?[a-z0-9._/-]*[a-z0-9]|[a-z0-9]")


class UnknownImage(LookupError):
    """A machine's image is built from a Dockerfile, and nothing says under which prefix it then is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """An image that is built once for all tasks that need it.

    Attributes:
        context: Directory with the Dockerfile.
        digest: Of the context's content.
        timeout: Limit of the build in seconds, the longest of the tasks'.
        tasks: Names of the tasks.
    """

    context: Path
    digest: str
    timeout: float
    tasks: tuple[str, ...]


def builds_of(tasks: Iterable[Task]) -> list[Build]:
    """The images that tasks need and that are built, each once, in the order of the tasks."""
    found: dict[str, Build] = {}
    for task in tasks:
        for machine in machines_of(task):
            if machine.context is None or machine.digest is None:
                continue
            seconds, known = machine.environment.build_timeout_sec, found.get(machine.digest)
            others = () if known is None else known.tasks
            found[machine.digest] = Build(
                context=machine.context if known is None else known.context,
                digest=machine.digest,
                timeout=seconds if known is None else max(seconds, known.timeout),
                tasks=others if task.name in others else (*others, task.name),
            )
    return list(found.values())


def machines_of(task: Task) -> list[Machine]:
    """The agent's machine, and the verifiers' own."""
    own = (stage.verification.machine for stage in task.stages)
    return [task.machine, *(machine for machine in own if machine is not None)]


def image_of(machine: Machine | Mapping[str, Any], prefix: str | None) -> str:
    """Reference of a machine's image: its own, or `PREFIX:DIGEST` of one that `kuberoll images build` has made.

    Args:
        machine: Of a task, or as it is in a row's metadata.
        prefix: What `kuberoll images build --tag` was given; None: nothing.

    Raises:
        UnknownImage: It is built, and there is no prefix.
    """
    if isinstance(machine, Machine):
        image, digest = machine.image, machine.digest
    else:
        image, digest = machine.get("image"), machine.get("build", {}).get("digest")
    if image is not None:
        return image
    if prefix is None or digest is None:
        raise UnknownImage(
            "the machine's image is built from a Dockerfile, and nothing says where it is: build it with "
            "`kuberoll images build TASKS --tag PREFIX`, and name the prefix"
        )
    return tagged(prefix, digest)


def tagged(prefix: str, digest: str) -> str:
    """The reference of what was built from a context with this digest."""
    return f"{prefix}:{digest[:_DIGITS]}"


def checked_prefix(prefix: str) -> str:
    """The prefix itself.

    Raises:
        ValueError: No image can be called so, or it has a tag already.
    """
    if not _PREFIX.fullmatch(prefix) or "//" in prefix:
        raise ValueError(
            f"{prefix!r} is no name of an image without a tag: write for example registry.example/team/tasks; "
            "digests become tags"
        )
    return prefix
