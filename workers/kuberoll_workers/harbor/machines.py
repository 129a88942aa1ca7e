"""Machines of tasks: the sandbox that a row asks for, within what its job allows."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, Literal

from kuberoll_api.model.sandboxes import Sandbox, SandboxNetwork
from kuberoll_workers.environments.interface import UnusableRow
from kuberoll_workers.harbor.images import UnknownImage, image_of
from kuberoll_workers.sandboxes.driver import SandboxSpec
from kuberoll_workers.sandboxes.egress.variables import variables as egress_variables
from kuberoll_workers.sandboxes.images.references import HOST

PROXY_PORT: Final = 3128
"""Port of the proxy in a sandbox with an allowlist."""

_MIB: Final = 1 << 20
_REFERENCE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?\}", re.DOTALL)
_SUFFIXES: Final[dict[str, Decimal | int]] = {
    "": 1, "m": Decimal("0.001"), "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reach:
    """What a sandbox reaches at a time.

    Attributes:
        mode: Nothing, hosts by a proxy, or everything.
        hosts: The hosts.
    """

    mode: Literal["None", "Allowlist", "All"]
    hosts: tuple[str, ...] = ()


def spec_of(machine: Mapping[str, Any], job: Sandbox, variables: Mapping[str, str], *, network: Reach) -> SandboxSpec:
    """The sandbox that a machine of a row needs (`harbor.rows`, MACHINE).

    Args:
        variables: Variables of the worker that rows may refer to.

    Raises:
        UnusableRow: It has no image, or refers to a variable that it may not read.
    """
    limits = {name: quantity(value) for name, value in job.resources.limits.items()}
    if machine.get("gpus"):
        raise UnusableRow("the task's machine needs GPUs, which no driver of sandboxes gives; use a task without")
    return SandboxSpec(
        image=_image(machine, job),
        cpus=_least(machine.get("cpus"), limits.get("cpu")),
        memory=_bytes(machine.get("memory_mb"), limits.get("memory")),
        storage=_bytes(machine.get("storage_mb"), limits.get("ephemeral-storage")),
        network="All" if network.mode == "All" else "None",
        user=job.user or "",
        workdir=machine.get("workdir", "") or job.workdir or "",
        environment={
            **(egress_variables(PROXY_PORT) if network.mode == "Allowlist" else {}),
            **resolved(machine.get("env", {}), variables),
            **job.variables,
        },
        start_seconds=float(machine.get("start_timeout", job.start_seconds)),
        total_seconds=job.total_seconds,
    )


def reach(wanted: Mapping[str, Any], allowed: SandboxNetwork | None, *, field: str = "network_mode") -> Reach:
    """What a sandbox reaches: what a row wants (`harbor.rows`, NETWORK), as far as its job allows.

    Args:
        field: Where the task says so.

    Raises:
        UnusableRow: The job says nothing, and the row wants something: without it tests could fail that would pass.
    """
    mode = wanted["mode"]
    if mode == "no-network" or (allowed is not None and allowed.mode == "None"):
        return Reach("None")
    if allowed is None:
        usual = " (which is Harbor's default)" if mode == "public" else ""
        raise UnusableRow(
            f"the task's {field} is {mode}{usual}, and the job says nothing of "
            "networks: set environments[].sandbox.network.mode to All, to Allowlist with hosts, or to None, where "
            "tasks are played without a network whatever they say"
        )
    hosts = tuple(wanted.get("hosts", ()))
    if allowed.mode == "All":
        return Reach("All") if mode == "public" else Reach("Allowlist", hosts)
    given = tuple(allowed.allowed_hosts)
    if mode == "public":
        return Reach("Allowlist", given)
    outside = [host for host in hosts if host not in given]
    if outside:
        raise UnusableRow(
            f"the task may reach {', '.join(outside)}, which environments[].sandbox.network.allowedHosts does not have"
        )
    return Reach("Allowlist", hosts)


def setup_reach(machine: Mapping[str, Any], usual: Reach, allowed: SandboxNetwork | None) -> Reach:
    """What a machine reaches while it is set up; only a proxy can be taken away from it then.

    Raises:
        UnusableRow: The job does not allow it, or nothing could be installed.
    """
    setup = machine.get("setup", {})
    if "network" not in setup or usual.mode == "All":
        found = usual
    else:
        found = reach(setup["network"], allowed, field="[setup] network_mode")
        if found.mode == "All":
            raise UnusableRow(
                "[setup] may reach everything, and its machine not: name the hosts that it needs (network_mode = "
                '"allowlist" and allowed_hosts)'
            )
        found = usual if found.mode == "None" else found
    if found.mode == "None" and setup.get("indexed"):
        raise UnusableRow(
            "the task's requirements are installed from an index, and its set-up reaches none: put the distributions "
            "into the task's directory wheels/ (pip download -r requirements.txt -d wheels), or name the index's hosts "
            'in the task ([setup] network_mode = "allowlist", allowed_hosts) and in '
            "environments[].sandbox.network.allowedHosts"
        )
    return found


def check_task(task: Mapping[str, Any], allowed: SandboxNetwork | None) -> None:
    """Check that a task asks for nothing that would be left out without a word.

    Raises:
        UnusableRow: It does.
    """
    machine = task["machine"]
    usual = reach(machine["network"], allowed)
    setup_reach(machine, usual, allowed)
    for step in task["steps"]:
        phases = {"agent": step.get("agent", {})}
        if step["verifier"].get("machine") is None:
            phases["verifier"] = step["verifier"]
        for name, phase in phases.items():
            if "network" in phase and reach(phase["network"], allowed) != usual:
                raise UnusableRow(
                    f"[{name}] has another network than [environment], and a machine has one network all the time; "
                    "give both the same, or let the tests have a machine of their own (environment_mode)"
                )
    if machine.get("mcp_servers"):
        raise UnusableRow("[environment] has mcp_servers, which no agent is given yet; use a task without")


def resolved(texts: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """Variables of a row, with those of the worker that they stand for: `${NAME}`, `${NAME:-default}`.

    Raises:
        UnusableRow: The worker has none of this name, or does not give it.
    """
    found = {}
    for name, text in texts.items():
        if (reference := _REFERENCE.fullmatch(text)) is None:
            found[name] = text
            continue
        wanted, default = reference.groups()
        value = variables.get(wanted, default)
        if value is None:
            raise UnusableRow(
                f"the task's variable {name} is the worker's {wanted}, which is not set or not given: name it in "
                "environments[].access.variables, and set it where the job runs"
            )
        found[name] = value
    return found


def given_variables(names: Sequence[str]) -> dict[str, str]:
    """The worker's variables that the job gives to its environment."""
    return {name: os.environ[name] for name in names if name in os.environ}


def quantity(value: str | int) -> float:
    """A quantity of Kubernetes as a number: "500m" is 0.5, "1Gi" 2^30."""
    text = str(value)
    number = text.rstrip("".join({letter for suffix in _SUFFIXES for letter in suffix}))
    return float(Decimal(number) * _SUFFIXES[text[len(number) :]])


def _image(machine: Mapping[str, Any], job: Sandbox) -> str:
    if machine.get("image") is None and "build" not in machine:
        return job.image or HOST
    try:
        return image_of(machine, job.built_images)
    except UnknownImage as error:
        if job.image is not None:
            return job.image
        raise UnusableRow(f"{error}: environments[].sandbox.builtImages") from error


def _bytes(mebibytes: float | None, most: float | None) -> int | None:
    found = _least(None if mebibytes is None else mebibytes * _MIB, most)
    return None if found is None else int(found)


def _least(*values: float | None) -> float | None:
    return min((value for value in values if value is not None), default=None)
