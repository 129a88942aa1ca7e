"""Autoscaling of backend Native's replicas by load. With backend KubeRay, Ray Serve decides.

The load is the number of turns that workers wait for: those in generation, and those that no replica has accepted yet.
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
    """Load that the workers put on the policy.

    Attributes:
        generating: Turns that wait for a response, of the workers that have reported.
        complete: True if all running workers have reported.
    """

    generating: int
    complete: bool


class Intent(NamedTuple):
    """A different number of replicas that has been called for since some time, but is not applied yet."""

    replicas: int
    since: datetime


class Decision(NamedTuple):
    """Number of replicas now, and a pending intent."""

    replicas: int
    intent: Intent | None


def replicas_for(spec: Autoscaling, load: Load) -> int:
    """Number of replicas that a load calls for."""
    return min(spec.max_replicas, max(fewest_replicas(spec), math.ceil(load.generating / spec.target_ongoing_requests)))


def decide(spec: Autoscaling, load: Load, current: int, intent: Intent | None, now: datetime) -> Decision:
    """Decide the number of replicas.

    A change must be called for throughout upscaleDelaySeconds or downscaleDelaySeconds. Scaling down never goes below
    the largest number called for during the delay, and does not happen while a worker has not reported.

    Args:
        current: Number of replicas that was applied last.
        intent: Intent of the last decision.
    """
    bounded = min(spec.max_replicas, max(fewest_replicas(spec), current))
    wanted = replicas_for(spec, load)
    if bounded != current:
        return Decision(bounded, None)
    if wanted == current or (wanted < current and not load.complete):
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
    """The intent in a Deployment's annotation; None if it has none that can be parsed."""
    text = (deployment["metadata"].get("annotations") or {}).get(names.AUTOSCALING)
    try:
        found = json.loads(text or "null")
        return None if found is None else Intent(int(found["replicas"]), datetime.fromisoformat(found["since"]))
    except (ValueError, TypeError, KeyError):
        return None


def intent_annotation(intent: Intent) -> str:
    """The intent as an annotation. It is there as long as a change is pending, so no other clock is needed."""
    return json.dumps({"replicas": intent.replicas, "since": intent.since.isoformat(timespec="seconds")})


def describe(spec: Autoscaling, load: Load) -> str:
    """Explanation of the number of replicas, for people."""
    text = (
        f"{load.generating} turns at {spec.target_ongoing_requests:g} per replica call for {replicas_for(spec, load)}, "
        f"within {fewest_replicas(spec)} to {spec.max_replicas}"
    )
    return text if load.complete else f"{text}; not all workers have reported yet"
