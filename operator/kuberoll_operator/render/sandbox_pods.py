"""Pods that trajectories' sandboxes will be, as far as a scheduler and a queue read them.

A pod set's template agrees with each pod that the broker makes for it in all that decides on which nodes a pod may run:
selectors, tolerations, affinity, RuntimeClass, spread, claims of devices. It reserves as much as the largest of them,
init containers included. That holds since the broker's own rendering makes both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.model.sandboxes import Sandbox
from kuberoll_api.sandboxes import CONTAINER, SandboxRequest
from kuberoll_operator.model import Object
from kuberoll_operator.podtemplate import merge
from kuberoll_operator.quantities import number_of
from kuberoll_operator.render.context import RenderContext
from kuberoll_operator.render.demand import demand
from kuberoll_operator.sandbox_pod import LEASE_ANNOTATION, PodContext, build_pod

POD_SET: Final = "sandboxes"
"""Name of the first pod set of a job's sandboxes; those of others end with the number of their first environment."""

# Each row may have its own.
_IMAGE: Final = "sandbox"
_AMOUNTS: Final = ("requests", "limits")
_CONTAINERS: Final = ("initContainers", "containers")


class SandboxPods(NamedTuple):
    """Sandboxes that differ in their size alone.

    Attributes:
        name: Name of their pod set.
        environments: Names of the environments that they are of.
        template: What they ask for: a pod template that is as large as the largest of them.
    """

    name: str
    environments: tuple[str, ...]
    template: Object


def sandboxed(job: RolloutJob) -> Iterator[tuple[int, Sandbox]]:
    """What is said of the sandboxes of each environment that has some, with its number."""
    for number, spec in enumerate(job.spec.environments):
        if spec.sandbox is not None:
            yield number, spec.sandbox


def sandbox_pods(context: RenderContext) -> list[SandboxPods]:
    """The kinds of pods of a job's sandboxes: environments whose pods may run on the same nodes have one together."""
    found: list[SandboxPods] = []
    for number, sandbox in sandboxed(context.job):
        spec = context.job.spec.environments[number]
        made = _template(context, spec.name, sandbox)
        for index, other in enumerate(found):
            if _without_size(other.template) == _without_size(made):
                template = _as_large_as(other.template, made)
                found[index] = SandboxPods(other.name, (*other.environments, spec.name), template)
                break
        else:
            found.append(SandboxPods(f"{POD_SET}-{number}" if found else POD_SET, (spec.name,), made))
    return found


def _template(context: RenderContext, environment: str, sandbox: Sandbox) -> Object:
    """The pod of the largest sandbox that an environment allows."""
    limits = {name: number_of(amount) for name, amount in sandbox.resources.limits.items()}
    largest = SandboxRequest(
        environment=environment,
        worker="worker",
        image=_IMAGE,
        command=["server"],
        identify=["identify"],
        cpus=float(limits["cpu"]) if "cpu" in limits else None,
        memory=math.ceil(limits["memory"]) if "memory" in limits else None,
        storage=math.ceil(limits["ephemeral-storage"]) if "ephemeral-storage" in limits else None,
    )
    settings = context.settings
    pods = PodContext(
        job=context.job,
        uid=context.uid,
        namespace=context.namespace,
        worker_image=settings.worker_image,
        image_pull_policy=settings.image_pull_policy,
        run_as_user=settings.run_as_user,
        run_as_group=settings.run_as_group,
    )
    pod = build_pod("sandbox", largest, pods)
    annotations = {name: text for name, text in pod["metadata"]["annotations"].items() if name != LEASE_ANNOTATION}
    asked = demand({"metadata": {"annotations": annotations}, "spec": pod["spec"]})
    return _sized(asked, _reserved(_main(asked).get("resources") or {}))


def _main(pod: Mapping[str, Any]) -> Object:
    [found] = [item for item in pod["spec"]["containers"] if item["name"] == CONTAINER]
    return dict(found)


def _reserved(resources: Mapping[str, Any]) -> Object:
    """With the requests that Kubernetes fills in: where there is none, the limit."""
    limits = resources.get("limits") or {}
    return {**resources, "requests": {**limits, **(resources.get("requests") or {})}}


def _sized(template: Object, resources: Object) -> Object:
    return merge(template, {"spec": {"containers": [{"name": CONTAINER, "resources": resources}]}})  # type: ignore[no-any-return]


def _without_size(template: Object) -> Object:
    spec = template["spec"]
    bare = {kind: [{**item, "resources": None} for item in spec[kind]] for kind in _CONTAINERS if kind in spec}
    return {**template, "spec": {**spec, **bare}}


def _as_large_as(template: Object, other: Object) -> Object:
    """A template whose containers reserve the larger amount of each resource; both have the same containers."""
    ours, theirs = template["spec"], other["spec"]
    larger = {
        kind: [_larger(one, another) for one, another in zip(ours[kind], theirs[kind], strict=True)]
        for kind in _CONTAINERS
        if kind in ours
    }
    return {**template, "spec": {**ours, **larger}}


def _larger(container: Object, other: Object) -> Object:
    resources: Object = {}
    for kind in _AMOUNTS:
        amounts = dict((container.get("resources") or {}).get(kind) or {})
        for name, amount in ((other.get("resources") or {}).get(kind) or {}).items():
            if name not in amounts or number_of(amount) > number_of(amounts[name]):
                amounts[name] = amount
        resources |= {kind: amounts} if amounts else {}
    return {**container, **({"resources": resources} if resources else {})}
