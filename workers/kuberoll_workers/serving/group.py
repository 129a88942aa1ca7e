"""A replica that spans a group of pods: the leader runs Ray, and the other pods join it with their GPUs.

LeaderWorkerSet tells every container of a group the address of its leader. The leader starts Ray, waits for the other
pods, and runs the Serve app as a single pod does; the others end when it ends.
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
# Trajectories do not go through the object store.
OBJECT_STORE_BYTES: Final = 100 << 20

_LOOK_SECONDS: Final = 1.0


class LeaderLost(Exception):
    """The leader's Ray cannot be joined or has ended."""


class PodGroup(msgspec.Struct, kw_only=True, frozen=True):
    """A pod's group, and its index in it.

    Attributes:
        leader: Address of the leader.
        size: Number of pods of the group, with the leader.
        index: Index of this pod; the leader's is 0.
        address: Address of this pod, at which the others reach its Ray.
        token: Token that the parts of this Ray authenticate with.
    """

    leader: str
    size: int
    index: int
    address: str
    token: str


def pod_group(environment: Mapping[str, str], secret: str | None) -> PodGroup | None:
    """The group of this pod; None if it is a replica by itself.

    Args:
        secret: A secret of the policy's pods that workers do not have; the group's token is derived from it.

    Raises:
        ValueError: Variables of the group are missing or invalid.
    """
    leader = environment.get(LEADER_VARIABLE)
    if leader is None:
        return None
    try:
        size, index = int(environment[SIZE_VARIABLE]), int(environment[INDEX_VARIABLE])
        address = environment[ADDRESS_VARIABLE]
    except (KeyError, ValueError) as error:
        names = ", ".join((SIZE_VARIABLE, INDEX_VARIABLE, ADDRESS_VARIABLE))
        raise ValueError(f"{LEADER_VARIABLE} is set, but {names} do not describe a group: {error}") from error
    if size < 2 and index == 0:
        return None
    if secret is None:
        raise ValueError("the pods of a group need the policy's token to authenticate, and it is not set")
    token = hmac.new(secret.encode(), b"ray", "sha256").hexdigest()
    return PodGroup(leader=leader, size=size, index=index, address=address, token=token)


def start_leader(group: PodGroup, sessions: Path, *, cpus: int) -> None:
    """Start the Ray that the other pods join; its processes are descendants of this one.

    Args:
        sessions: Directory in which Ray keeps its sessions.
        cpus: Number of logical CPUs.

    Raises:
        RuntimeError: Ray does not start; the message is its output.
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
    """Wait until all pods of the group have joined the Ray that this process is connected to.

    Raises:
        RuntimeError: They have not joined in time.
    """
    import ray

    deadline = time.monotonic() + seconds
    while (joined := sum(node["Alive"] for node in ray.nodes())) < group.size:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{joined} of the {group.size} pods of this replica have joined within {seconds:.0f} s")
        time.sleep(_LOOK_SECONDS)
    _log.info("all %d pods of this replica have joined", group.size)


def follow(group: PodGroup, *, seconds: float) -> None:
    """Lend this pod's GPUs to the leader's Ray until a signal ends this process.

    Args:
        seconds: Time for the leader to start.

    Raises:
        LeaderLost: It did not start in time, or its Ray has ended.
    """
    deadline = time.monotonic() + seconds
    while not _answers(group.leader):
        if time.monotonic() > deadline:
            raise LeaderLost(f"the leader of this replica, {group.leader}, has not started within {seconds:.0f} s")
        time.sleep(_LOOK_SECONDS)
    command = _ray_start(
        f"--address={group.leader}:{RAY_PORT}",
        f"--node-ip-address={group.address}",
        # The replica and all of Serve run on the leader.
        "--num-cpus=0",
        "--block",
    )
    _log.info("joining the Ray of %s", group.leader)
    code = subprocess.run(command, check=False).returncode
    raise LeaderLost(f"the Ray of this replica's leader, {group.leader}, has ended (exit code {code})")


def _ray_start(*options: str) -> list[str]:
    common = (f"--object-store-memory={OBJECT_STORE_BYTES}", "--disable-usage-stats")
    return [sys.executable, "-m", "ray.scripts.scripts", "start", *options, *common]


def _answers(host: str) -> bool:
    try:
        with socket.create_connection((host, RAY_PORT), timeout=_LOOK_SECONDS):
            return True
    except OSError:
        return False
