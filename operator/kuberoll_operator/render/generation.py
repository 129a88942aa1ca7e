"""Generation pods of backend Native: every replica is a Ray cluster of its own.

A replica is a pod of a Deployment, or a group of pods of a LeaderWorkerSet whose leader answers for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kuberoll_api import contract
from kuberoll_operator import names
from kuberoll_operator.model import Object
from kuberoll_operator.render.access import access_token_variables
from kuberoll_operator.render.context import RenderContext
from kuberoll_operator.render.model_cache import with_model_cache
from kuberoll_operator.render.objects import shaped
from kuberoll_operator.render.pods import (
    POD_IP,
    STATE_VARIABLES,
    STAYS,
    container,
    engine_volumes,
    pod_template,
    spread,
)
from kuberoll_operator.render.policy_access import servers_token_variables
from kuberoll_operator.render.tokens import token_variables

MUTABLE: Final = frozenset({"replicas", "progressDeadlineSeconds"})
"""Fields of the Deployment that may change without restarting engines."""

GROUPS_MUTABLE: Final = frozenset({"replicas"})
"""Fields of the LeaderWorkerSet that may change without restarting engines."""

STRATEGY: Final[Mapping[str, Any]] = {
    "type": "RollingUpdate",
    "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
}
"""Update strategy of engines: a surge pod could wait forever for a second GPU."""

GRACE_SECONDS: Final = 60
PROBE_SECONDS: Final = 10


def build_generation_deployment(context: RenderContext, *, replicas: int) -> Object:
    """Deployment <job>-generation.

    It never has more pods than replicas. Weights are not part of it: pods read them from their mounted configuration
    while they run.
    """
    spec = context.job.spec
    child = context.child("apps/v1", "Deployment", names.generation(context.name), names.GENERATION)
    child["spec"] = {
        "progressDeadlineSeconds": spec.startup_deadline_seconds,
        "replicas": replicas,
        "revisionHistoryLimit": 0,
        "selector": {"matchLabels": names.selector(context.name, names.GENERATION)},
        "strategy": STRATEGY,
        "template": _template(context, apart={}),
    }
    return shaped(child, MUTABLE)


def build_generation_groups(context: RenderContext, *, replicas: int, size: int) -> Object:
    """LeaderWorkerSet <job>-replicas: every group of pods is one replica.

    A group is recreated when one of its containers restarts: the model is spread over its pods and lost with one of
        them.

    Args:
        size: Pods of a group, including the leader.
    """
    name = names.leader_worker_set(context.name)
    child = context.child("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", name, names.GENERATION)
    child["spec"] = {
        "leaderWorkerTemplate": {
            "leaderTemplate": _template(context, apart={names.WORKER_INDEX_LABEL: "0"}),
            "restartPolicy": "RecreateGroupOnPodRestart",
            "size": size,
            # The pods of a group talk all the time: they are not spread.
            "workerTemplate": _template(context, answers=False, apart=None),
        },
        "replicas": replicas,
        "rolloutStrategy": {
            "type": "RollingUpdate",
            "rollingUpdateConfiguration": {"maxSurge": 0, "maxUnavailable": 1},
        },
        "startupPolicy": "LeaderCreated",
    }
    return shaped(child, GROUPS_MUTABLE)


def build_generation_budget(context: RenderContext) -> Object:
    """PodDisruptionBudget <job>-generation: a drain takes one replica at a time.

    It counts the pods that Deployments and StatefulSets want, as they have a scale: of groups all pods, since a group
    ends with any of them. It would have nothing to count for pods of a RayCluster or a Job, and would forbid to evict
    any of them: workers need none, because they drain and are replaced.
    """
    child = context.child("policy/v1", "PodDisruptionBudget", names.generation(context.name), names.GENERATION)
    child["spec"] = {
        "maxUnavailable": 1,
        "selector": {"matchLabels": names.selector(context.name, names.GENERATION)},
        # An engine that is not ready serves nobody: it must not keep a node from being drained.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return child


def _template(context: RenderContext, *, apart: Mapping[str, str] | None, answers: bool = True) -> Object:
    """Template of generation pods.

    Args:
        apart: Labels, besides those of all generation pods, of those that are on other nodes if possible; None: it does
            not matter. The same for one replica, so that its template stays when others come.
        answers: True if the pod serves its replica; False if another pod of the group does.
    """
    spec = context.job.spec
    options = spec.generation
    volumes = engine_volumes(context)
    # Serve's own paths on the policy's port succeed too early, or wait behind generation: the pod's main process
    # answers instead.
    ready = {"httpGet": {"path": "/healthz", "port": "metrics"}, "timeoutSeconds": 5}
    alive = {"httpGet": {"path": "/livez", "port": "metrics"}, "timeoutSeconds": 10}
    probes: dict[str, Any] = {
        "startupProbe": {
            **(ready if answers else alive),
            "periodSeconds": PROBE_SECONDS,
            "failureThreshold": -(-spec.startup_deadline_seconds // PROBE_SECONDS),
        },
        **({"readinessProbe": {**ready, "periodSeconds": 5, "failureThreshold": 2}} if answers else {}),
        # The pod itself ends if its engine does not come back; this probe is for a main process that hangs.
        "livenessProbe": {**alive, "periodSeconds": PROBE_SECONDS, "failureThreshold": 6},
    }
    main = container(
        context,
        options,
        name="generation",
        module="kuberoll_workers.pods.generation",
        image=context.settings.generation_image,
        env=[
            *STATE_VARIABLES,
            POD_IP,
            *token_variables(context, *contract.SCOPES),
            *servers_token_variables(context),
            *access_token_variables(context),
        ],
        volumes=volumes,
        read_only=False,
        ports=[
            {"name": "http", "containerPort": contract.GENERATION_PORT},
            {"name": "metrics", "containerPort": contract.STATUS_PORT},
        ],
        **probes,
    )
    template = pod_template(
        context,
        options,
        component=names.GENERATION,
        container=main,
        volumes=volumes,
        grace_seconds=GRACE_SECONDS,
        restart_policy="Always",
        over=options.pod_template,
        annotations=STAYS,
        apart=[] if apart is None else spread({**names.selector(context.name, names.GENERATION), **apart}),
    )
    model = None if spec.generation.engine == "Simulated" else spec.generation.model
    return with_model_cache(context, template, model, spec.generation.engine_args, container="generation")


def build_generation_services(context: RenderContext, *, leaders: bool = False) -> list[Object]:
    """Service <job>-generation, the endpoint, and headless Service <job>-generation-pods.

    The addresses of the second one are the ready replicas, which workers call one by one.

    Args:
        leaders: True if replicas are groups of pods, whose leaders answer.
    """
    http = {"name": "http", "port": contract.GENERATION_PORT, "targetPort": contract.GENERATION_PORT}
    metrics = {"name": "metrics", "port": contract.STATUS_PORT, "targetPort": contract.STATUS_PORT}
    serving = dict(context.hosting.service_labels)
    leading = {names.WORKER_INDEX_LABEL: "0"} if leaders else {}
    return [
        _service(context, names.generation(context.name), {"type": "ClusterIP", "ports": [http]}, serving | leading),
        _service(
            context, names.generation_pods(context.name), {"clusterIP": "None", "ports": [http, metrics]}, leading
        ),
    ]


def _service(context: RenderContext, name: str, spec: dict[str, Any], labels: dict[str, str]) -> Object:
    child = context.child("v1", "Service", name, names.GENERATION)
    return {**child, "spec": {**spec, "selector": {**names.selector(context.name, names.GENERATION), **labels}}}
