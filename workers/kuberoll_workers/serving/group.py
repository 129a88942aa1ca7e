"""A replica that spans pods: the Ray of its leader, which the other pods of the group join with what they have.

LeaderWorkerSet tells every container of a group where its leader is. The leader starts Ray, waits until all are there,
and runs the Serve app as a pod of its own does; the others lend their GPUs, and end when it ends.
"""

from __future__ import annotations

import hmac
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

_log = logging.getLogger(__name__)

LEADER_VARIABLE: Final = "LWS_LEADER_ADDRESS"
SIZE_VARIABLE: Final = "LWS_GROUP_SIZE"
INDEX_VARIABLE: Final = "LWS_WORKER_INDEX"
ADDRESS_VARIABLE: Final = "POD_IP"

RAY_PORT: Final = 6379
# Trajectories do not pass through it.
OBJECT_STORE_BYTES: Final = 100 << 20

_LOOK_SECONDS: Final = 1.0


class LeaderLost(Exception):
    """The leader's Ray cannot be joined, or is gone."""


class PodGroup(msgspec.Struct, kw_only=True, frozen=True):
    """A pod's place in its group.

    Attributes:
        leader: Address of the leader.
        size: Pods of the group, the leader among them.
        index: Which of them this one is; the leader is 0.
        address: Of this pod, at which the others reach its Ray.
        token: What the parts of this Ray show each other.
    """

    leader: str
    size: int
    index: int
    address: str
    token: str


def pod_group(environment: Mapping[str, str], secret: str | None) -> PodGroup | None:
    """The group of this pod; None: it is a replica by itself.

    Args:
        secret: What all pods of the policy know and no worker does; the group's token is made of it.

    Raises:
        ValueError: The group cannot be made out.
    """
    leader = environment.get(LEADER_VARIABLE)
    if leader is None:
        return None
    try:
        size, index = int(environment[SIZE_VARIABLE]), int(environment[INDEX_VARIABLE])
        address = environment[ADDRESS_VARIABLE]
    except (KeyError, ValueError) as error:
        names = ", ".join((SIZE_VARIABLE, INDEX_VARIABLE, ADDRESS_VARIABLE))
        raise ValueError(f"{LEADER_VARIABLE} is set, and {names} tell of no group: {error}") from error
    if size < 2 and index == 0:
        return None
    if secret is None:
        raise ValueError("the pods of a group know each other by the policy's token, and there is none")
    token = hmac.new(secret.encode(), b"ray", "sha256").hexdigest()
    return PodGroup(leader=leader, size=size, index=index, address=address, token=token)


def start_leader(group: PodGroup, sessions: Path, *, cpus: int) -> None:
    """Start this pod's Ray, for the others to join; it goes on below this process.

    Args:
        sessions: Directory in which Ray keeps its sessions.
        cpus: Logical ones.

    Raises:
        RuntimeError: Ray does not start; with its words.
    """
    command = _ray_start(
        "--head",
        f"--node-ip-address={group.address}",
        f"--port={RAY_PORT}",
        f"--num-cpus={cpus}",
        f"--temp-dir={sessions}",
        "--include-dashboard=false",
    )
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stdout[-2000:])


def wait_for_group(group: PodGroup, *, seconds: float) -> None:
    """Return when all pods of the group have joined the Ray that this process is connected to.

    Raises:
        RuntimeError: They have not in time.
    """
    import ray

    deadline = time.monotonic() + seconds
    while (there := sum(node["Alive"] for node in ray.nodes())) < group.size:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{there} of the {group.size} pods of this replica have come within {seconds:.0f} s")
        time.sleep(_LOOK_SECONDS)
    _log.info("all %d pods of this replica are here", group.size)


def follow(group: PodGroup, *, seconds: float) -> None:
    """Lend this pod's GPUs to the leader's Ray until a signal ends this process.

    Args:
        seconds: That the leader has to begin.

    Raises:
        LeaderLost: It did not begin, or its Ray is gone.
    """
    deadline = time.monotonic() + seconds
    while not _answers(group.leader):
        if time.monotonic() > deadline:
            raise LeaderLost(f"the leader of this replica, {group.leader}, has not begun within {seconds:.0f} s")
        time.sleep(_LOOK_SECONDS)
    command = _ray_start(
        f"--address={group.leader}:{RAY_PORT}",
        f"--node-ip-address={group.address}",
        # The replica, and all that Serve runs, are on the leader.
        "--num-cpus=0",
        "--block",
    )
    _log.info("joining the Ray of %s", group.leader)
    code = subprocess.run(command, check=False).returncode
    raise LeaderLost(f"the Ray of this replica's leader, {group.leader}, is gone (exit code {code})")


def _ray_start(*options: str) -> list[str]:
    common = (f"--object-store-memory={OBJECT_STORE_BYTES}", "--disable-usage-stats")
    return [sys.executable, "-m", "ray.scripts.scripts", "start", *options, *common]


def _answers(host: str) -> bool:
    try:
        with socket.create_connection((host, RAY_PORT), timeout=_LOOK_SECONDS):
            return True
    except OSError:
        return False
