"""How many replicas backend Native has where they follow the load; Ray decides for itself with backend KubeRay.

A replica's load are the turns that workers wait for: those that it generates, and those that nobody has taken yet.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from kuberoll_api.contract import fewest_replicas
from kuberoll_api.model.generation import Autoscaling
from kuberoll_operator import names


class Load(NamedTuple):
    """What the workers ask of the policy.

    Attributes:
        generating: Turns that wait for a response, of the workers that told.
        known: Whether all workers that run told.
    """

    generating: int
    known: bool


class Intent(NamedTuple):
    """Another number of replicas, called for since some time; not done yet."""

    replicas: int
    since: datetime


class Decision(NamedTuple):
    """How many replicas there are to be now, and what is waited with."""

    replicas: int
    intent: Intent | None


def called_for(spec: Autoscaling, load: Load) -> int:
    """Replicas that such a load calls for."""
    return min(spec.max_replicas, max(fewest_replicas(spec), math.ceil(load.generating / spec.target_ongoing_requests)))


def decide(spec: Autoscaling, load: Load, current: int, intent: Intent | None, now: datetime) -> Decision:
    """How many replicas there are to be.

    More or fewer must be called for all through upscaleDelaySeconds or downscaleDelaySeconds; there are never fewer
    than at any moment of that time were called for, nor fewer at all while a worker has not told of itself.

    Args:
        current: Replicas that were asked for last.
        intent: As the last decision gave it.
    """
    bounded = min(spec.max_replicas, max(fewest_replicas(spec), current))
    wanted = called_for(spec, load)
    if bounded != current:
        return Decision(bounded, None)
    if wanted == current or (wanted < current and not load.known):
        return Decision(current, None)
    up = wanted > current
    if intent is None or intent.replicas == current or (intent.replicas > current) is not up:
        intent = Intent(wanted, now)
    else:
        intent = Intent(wanted if up else max(wanted, intent.replicas), intent.since)
    delay = spec.upscale_delay_seconds if up else spec.downscale_delay_seconds
    return (
        Decision(intent.replicas, None) if now - intent.since >= timedelta(seconds=delay) else Decision(current, intent)
    )


def read_intent(deployment: Mapping[str, Any]) -> Intent | None:
    """The intent that a Deployment is annotated with; None where it has none that can be read."""
    text = (deployment["metadata"].get("annotations") or {}).get(names.AUTOSCALING)
    try:
        found = json.loads(text or "null")
        return None if found is None else Intent(int(found["replicas"]), datetime.fromisoformat(found["since"]))
    except (ValueError, TypeError, KeyError):
        return None


def written(intent: Intent) -> str:
    """The same as an annotation; it is there as long as something is waited with, and no clock is needed besides."""
    return json.dumps({"replicas": intent.replicas, "since": intent.since.isoformat(timespec="seconds")})


def described(spec: Autoscaling, load: Load) -> str:
    """Why there are as many as there are, for people."""
    text = (
        f"{load.generating} turns at {spec.target_ongoing_requests:g} a replica call for {called_for(spec, load)}, "
        f"within {fewest_replicas(spec)} to {spec.max_replicas}"
    )
    return text if load.known else f"{text}; not all workers have reported yet"
