"""Placement of replicas: GPUs per replica and pods per replica. Pure arithmetic, so that errors can show it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kuberoll_api.model.generation import Generation

GPU: Final = "nvidia.com/gpu"

_PARALLEL: Final = ("tensor_parallel_size", "pipeline_parallel_size")


class PlacementError(ValueError):
    """Replicas do not fit into pods; the message names the fields and shows the arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Distribution of replicas over pods.

    Attributes:
        gpus: GPUs of a replica; less than 1 for a fraction of a GPU.
        pod_gpus: GPUs of a pod.
        per_pod: Replicas in a pod; 1 if a replica spans pods.
        pods_per_replica: Pods that a replica spans; 1 if it fits into one.
    """

    gpus: float
    pod_gpus: int
    per_pod: int = 1
    pods_per_replica: int = 1

    def pods(self, replicas: int) -> int:
        """Number of pods for a number of replicas."""
        return -(-replicas // self.per_pod) * self.pods_per_replica

    def replicas(self, pods: int) -> int:
        """Number of replicas that fit into a number of pods."""
        return pods // self.pods_per_replica * self.per_pod

    def bundles(self) -> list[dict[str, float]] | None:
        """Ray's resource bundles of a replica that spans pods: one GPU each, as vLLM expects.

        The first bundle also has the CPU of the replica's actor. None if the replica fits into one pod.
        """
        if self.pods_per_replica == 1:
            return None
        return [{"CPU": 1.0, "GPU": 1.0}, *({"GPU": 1.0} for _ in range(round(self.gpus) - 1))]


def gpus_of(generation: Mapping[str, Any]) -> float:
    """GPUs of a replica, from `spec.generation` as JSON; 0 if its pods have none."""
    limits = (generation.get("resources") or {}).get("limits") or {}
    if str(limits.get(GPU, "0")) == "0":
        return 0.0
    arguments = generation.get("engineArgs") or {}
    # Invalid values are ignored here; `place` rejects them.
    sizes = [size for name in _PARALLEL if isinstance(size := arguments.get(name), int)]
    return float(generation.get("gpusPerReplica") or math.prod(sizes))


def place(generation: Generation, *, one_per_pod: bool, may_span: bool = False) -> Placement:
    """Place the replicas of a job.

    If its pods have no GPUs, every replica is one pod.

    Args:
        one_per_pod: A pod holds at most one replica (backend Native); otherwise replicas may share pods or span them.
        may_span: A replica may span pods even if `one_per_pod`.

    Raises:
        PlacementError: The replicas do not fit into the pods.
    """
    pod_gpus = _pod_gpus(generation)
    gpus, shown = _replica_gpus(generation, pod_gpus)
    if pod_gpus == 0 or gpus == 0:
        return Placement(gpus=0, pod_gpus=pod_gpus)
    if gpus == pod_gpus:
        return Placement(gpus=gpus, pod_gpus=pod_gpus)
    if one_per_pod and not (may_span and gpus > pod_gpus):
        remedy = f'set spec.generation.resources.limits."{GPU}" to {gpus:g}' if gpus >= 1 else "use backend KubeRay"
        if gpus > pod_gpus and not may_span:
            remedy += ", use backend KubeRay, or install LeaderWorkerSet (leaderworkerset.x-k8s.io/v1)"
        raise PlacementError(
            f"{shown}; pods have {pod_gpus}, and with backend Native every pod is one replica: {remedy}, or "
            f"{_fewer(generation, pod_gpus)}"
        )
    if gpus < 1:
        return Placement(gpus=gpus, pod_gpus=pod_gpus, per_pod=pod_gpus * _shares(gpus))
    whole = round(gpus)
    if pod_gpus % whole == 0:
        return Placement(gpus=gpus, pod_gpus=pod_gpus, per_pod=pod_gpus // whole)
    if whole % pod_gpus == 0:
        return Placement(gpus=gpus, pod_gpus=pod_gpus, pods_per_replica=whole // pod_gpus)
    fitting = ", ".join(str(count) for count in range(1, whole + 1) if whole % count == 0)
    raise PlacementError(
        f"{shown}; pods have {pod_gpus}, which is neither a multiple nor a divisor of it: set "
        f'spec.generation.resources.limits."{GPU}" to one of {fitting}, or a multiple of {whole}'
    )


def placement_problem(generation: Generation, *, one_per_pod: bool, may_span: bool = False) -> str | None:
    """Reason why a job's replicas cannot be placed; None if they can.

    Args:
        one_per_pod, may_span: As in `place`.
    """
    try:
        place(generation, one_per_pod=one_per_pod, may_span=may_span)
    except PlacementError as error:
        return str(error)
    return None


def _replica_gpus(generation: Generation, pod_gpus: int) -> tuple[float, str]:
    """GPUs of a replica, and the arithmetic behind the number."""
    sizes = [(name, _size(generation.engine_args, name)) for name in _PARALLEL]
    world = sizes[0][1] * sizes[1][1]
    factors = f"{' x '.join(f'{name} {size}' for name, size in sizes)} = {world}"
    given = generation.gpus_per_replica
    if generation.engine == "Simulated" and (given is None or pod_gpus == 0):
        return 0, ""
    if given is None:
        return float(world), f"spec.generation.engineArgs: {factors} GPU{'s' * (world > 1)} a replica"
    path = "spec.generation.gpusPerReplica"
    if pod_gpus == 0:
        raise PlacementError(f'{path}: {given:g}; pods have 0: set spec.generation.resources.limits."{GPU}"')
    if given > 1 and not given.is_integer():
        raise PlacementError(f"{path}: {given:g}; more than one GPU must be a whole number of them")
    if given < world and world > 1:
        raise PlacementError(f"{path}: {given:g} is less than {factors}: remove it, or set it to {world}")
    return given, f"{path}: {given:g} GPU{'s' * (given > 1)} a replica"


def _size(arguments: Mapping[str, Any], name: str) -> int:
    value = arguments.get(name, 1)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlacementError(f"spec.generation.engineArgs.{name}: found {value!r}; a number of GPUs is 1 or more")
    return value


def _pod_gpus(generation: Generation) -> int:
    """GPUs of a pod; the job's pod template takes precedence, as it does in the rendered pod."""
    limits: dict[str, Any] = dict(generation.resources.limits)
    path = f'spec.generation.resources.limits."{GPU}"'
    for item in generation.main_containers:
        limits |= (item.get("resources") or {}).get("limits") or {}
    value = limits.get(GPU) or 0
    if not str(value).isdecimal():
        raise PlacementError(f"{path}: found {value!r}; Kubernetes gives whole GPUs only")
    return int(str(value))


def _shares(gpus: float) -> int:
    """Number of replicas of this size that share one GPU; Ray counts in ten-thousandths."""
    return 10_000 // max(1, round(gpus * 10_000))


def _fewer(generation: Generation, pod_gpus: int) -> str:
    if generation.gpus_per_replica is not None:
        return f"gpusPerReplica to {pod_gpus}"
    return f"spread the model over {pod_gpus} (tensor_parallel_size x pipeline_parallel_size)"
