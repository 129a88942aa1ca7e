"""The RayService of backend KubeRay: a head without GPU, one group of engine pods, and Serve's configuration.

A change of `rayClusterConfig` would start a second cluster of GPUs beside the first, or have no effect with upgrades
off; only `serveConfigV2` changes in place. A running RayService therefore keeps its cluster as it was rendered at
first.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kuberoll_api import contract
from kuberoll_api.contract import (
    APPLICATION,
    DEPLOYMENT,
    IMPORT_PATH,
    ServeArgs,
    fewest_replicas,
    user_config,
    weights_source,
)
from kuberoll_api.model.pods import PodOptions
from kuberoll_operator import names
from kuberoll_operator.model import Object
from kuberoll_operator.placement import Placement
from kuberoll_operator.render.access import access_token_variables
from kuberoll_operator.render.config import STATE_DIRECTORY
from kuberoll_operator.render.context import RenderContext
from kuberoll_operator.render.generation import GRACE_SECONDS
from kuberoll_operator.render.model_cache import with_model_cache
from kuberoll_operator.render.objects import annotated, annotation, digest
from kuberoll_operator.render.pods import STAYS, TEMPORARY_DIRECTORY, Volumes, container, pod_template, spread
from kuberoll_operator.render.policy_access import servers_token_variables
from kuberoll_operator.render.tokens import token_variables

GROUP: Final = "engines"
GROUP_LABEL: Final = "ray.io/group"
"""KubeRay's label on a pod: the group that it belongs to."""

INITIALIZING_TIMEOUT: Final = "ray.io/initializing-timeout"
"""KubeRay's annotation: a RayService that is not ready after this time never becomes ready."""

SERVE_ENVIRONMENT: Final = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # A proxy restarts when replicas are added or removed; requests older than this end then.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
    # Workers refresh the list of replicas every few seconds, and have noticed by then that this one is leaving.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "10",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Variables for Serve's controller on the head and its proxies on all pods: the same everywhere."""

BALANCE: Final = {"Session": "hdr(x-session-id)", "LeastLoaded": "leastconn"}
"""Load balancing of the proxies, for callers that do not choose a replica themselves."""

_OF_HEAD: Final = ("imagePullSecrets", "priorityClassName")
"""Fields of the engines' pod template that apply to the head, too."""

HEAD_RESOURCES: Final = {"limits": {"memory": "4Gi"}, "requests": {"cpu": "500m", "memory": "2Gi"}}


HEALTH_PORT: Final = 52365
"""Port of Ray's dashboard agent, which has `/api/healthz` since Ray 2.53."""

# KubeRay adds probes to containers that have none, and its readiness probe of engines needs wget and bash in the image.
# The numbers are those of KubeRay 1.7, except that an engine becomes unready after three failures instead of one: on a
# busy node a proxy may answer late once.
_ALIVE: Final = {
    "httpGet": {"path": "/api/healthz", "port": HEALTH_PORT},
    "initialDelaySeconds": 30,
    "periodSeconds": 5,
    "timeoutSeconds": 5,
    "failureThreshold": 120,
}
_HEAD_READY: Final = {**_ALIVE, "initialDelaySeconds": 5, "failureThreshold": 10}
_ENGINE_READY: Final = {
    "httpGet": {"path": "/-/healthz", "port": "serve"},
    "initialDelaySeconds": 5,
    "periodSeconds": 5,
    "timeoutSeconds": 5,
    "failureThreshold": 3,
}

# Serve keeps next to nothing in the object store, and /dev/shm is for the engines.
_OBJECT_STORE_BYTES: Final = 256 * 1024**2
_TOKEN_SINCE: Final = (2, 52)


def build_rayservice(context: RenderContext, placement: Placement) -> Object:
    """RayService <job>-gen."""
    child = context.child("ray.io/v1", "RayService", names.ray_service(context.name), names.GENERATION)
    deadline = f"{context.job.spec.startup_deadline_seconds}s"
    made = annotated(child, {INITIALIZING_TIMEOUT: deadline})
    made["spec"] = {
        "excludeHeadPodFromServeSvc": True,
        "rayClusterConfig": _cluster(context, placement),
        "serveConfigV2": _text(serve_config(context, placement)),
        # A second cluster would wait for the GPUs of the first.
        "upgradeStrategy": {"type": "None"},
    }
    return annotated(made, {names.SHAPE_DIGEST: digest(_shape(made["spec"]))})


def keep_cluster(rendered: Object, live: Object | None) -> Object:
    """A rendered RayService with the cluster of the live one: only the weights and KubeRay's deadline are as rendered.

    A running cluster is not restarted because the operator has a new default image.
    """
    found = None if live is None else annotation(live, names.SHAPE_DIGEST)
    if live is None or found is None or found == annotation(rendered, names.SHAPE_DIGEST):
        return rendered
    config = json.loads(live["spec"]["serveConfigV2"])
    wanted = json.loads(rendered["spec"]["serveConfigV2"])
    for there, here in zip(config["applications"], wanted["applications"], strict=True):
        there["deployments"] = here["deployments"]
    spec = {**live["spec"], "serveConfigV2": _text(config)}
    return annotated({**rendered, "spec": spec}, {names.SHAPE_DIGEST: found})


def serve_config(context: RenderContext, placement: Placement) -> dict[str, Any]:
    """Serve's configuration: `serveConfigV2` before it is written as text."""
    wanted = weights_source(context.job.spec.weights)
    application = {
        "name": APPLICATION,
        "import_path": IMPORT_PATH,
        "route_prefix": "/",
        "args": serve_args(context, placement),
        # Changes in place, in every replica and in later ones; a changed argument would reload all engines.
        "deployments": [{"name": DEPLOYMENT, "user_config": user_config(wanted)}],
    }
    return {
        "applications": [application],
        "http_options": {"host": "0.0.0.0", "port": contract.GENERATION_PORT},
        # KubeRay considers a pod without a proxy not ready.
        "proxy_location": "EveryNode",
    }


def serve_args(context: RenderContext, placement: Placement) -> dict[str, Any]:
    """Arguments of the Serve application; defaults are left out."""
    generation = context.job.spec.generation
    args = ServeArgs.of(generation, gpus=placement.gpus, bundles=placement.bundles(), tokens_required=True)
    fields = dataclasses.asdict(args)
    if generation.autoscaling is not None:
        # Serve accepts either replicas or autoscaling.
        del fields["replicas"]
    always = {"engine_args", "max_ongoing_requests", "replicas"}
    defaults = dataclasses.asdict(ServeArgs(model="", tokenizer="", engine=""))
    return {key: value for key, value in fields.items() if key in always or value != defaults[key]}


def _cluster(context: RenderContext, placement: Placement) -> dict[str, Any]:
    generation = context.job.spec.generation
    scales = generation.autoscaling is not None
    cluster: dict[str, Any] = {
        "rayVersion": context.settings.ray_version,
        "headGroupSpec": {
            "rayStartParams": {
                "dashboard-host": "0.0.0.0",
                # Only Serve's own actors run there, and they request no CPUs.
                "num-cpus": "0",
                "num-gpus": "0",
                "object-store-memory": str(_OBJECT_STORE_BYTES),
            },
            "template": _head(context, service_account=scales),
        },
        "workerGroupSpecs": [_group(context, placement)],
    }
    if tuple(int(part) for part in context.settings.ray_version.split(".")[:2]) >= _TOKEN_SINCE:
        cluster["authOptions"] = {"mode": "token"}
    if scales:
        cluster["enableInTreeAutoscaling"] = True
        cluster["autoscalerOptions"] = {
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        }
    return cluster


def _group(context: RenderContext, placement: Placement) -> dict[str, Any]:
    generation = context.job.spec.generation
    spec = generation.autoscaling
    fewest, most = (fewest_replicas(spec), spec.max_replicas) if spec else 2 * (generation.replicas or 1,)
    return {
        "groupName": GROUP,
        "replicas": placement.pods(fewest),
        "minReplicas": placement.pods(fewest),
        "maxReplicas": placement.pods(most),
        "rayStartParams": {
            # Each replica requests one, whatever the pod's CPU limit is.
            "num-cpus": str(placement.per_pod),
            "object-store-memory": str(_OBJECT_STORE_BYTES),
        },
        "template": _engines(context, placement),
    }


def _engines(context: RenderContext, placement: Placement) -> Object:
    options = context.job.spec.generation
    # The processes of a model that is spread over GPUs exchange data through shared memory.
    volumes = _volumes(shared_gib=1 + max(1, placement.pod_gpus))
    main = container(
        context,
        options,
        name="generation",
        module=None,
        image=context.settings.generation_image,
        env=_environment(context),
        volumes=volumes,
        read_only=False,
        ports=[
            {"name": "serve", "containerPort": contract.GENERATION_PORT},
            {"name": "metrics", "containerPort": contract.STATUS_PORT},
        ],
        readinessProbe=_ENGINE_READY,
        livenessProbe=_ALIVE,
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
        apart=spread({**names.selector(context.name, names.GENERATION), GROUP_LABEL: GROUP}),
        labels=_labels(context),
    )
    model = None if options.engine == "Simulated" else options.model
    return with_model_cache(context, template, model, options.engine_args, container="generation")


def _head(context: RenderContext, *, service_account: bool) -> Object:
    """Template of the head, which holds no model: of the job's pod options, only those that concern the image apply.

    Args:
        service_account: True if Ray's autoscaler runs beside it, which calls the API server with an account that
            KubeRay creates.
    """
    generation = context.job.spec.generation
    # Ray's variables must be the same on all nodes; the head needs no others of the engines'.
    options = PodOptions(image=generation.image, env=_of_ray(generation.env))
    over = {name: generation.template_spec[name] for name in _OF_HEAD if name in generation.template_spec}
    if variables := [item for main in generation.main_containers for item in _of_ray(main.get("env") or ())]:
        over["containers"] = [{"name": "head", "env": variables}]
    if service_account:
        over["automountServiceAccountToken"] = True
    volumes = _volumes(shared_gib=1)
    main = container(
        context,
        options,
        name="head",
        module=None,
        image=context.settings.generation_image,
        env=_environment(context),
        volumes=volumes,
        read_only=False,
        ports=[
            {"name": "gcs", "containerPort": 6379},
            {"name": "dashboard", "containerPort": names.RAY_DASHBOARD_PORT},
            {"name": "client", "containerPort": 10001},
            {"name": "serve", "containerPort": contract.GENERATION_PORT},
            {"name": "metrics", "containerPort": contract.STATUS_PORT},
        ],
        resources=HEAD_RESOURCES,
        readinessProbe=_HEAD_READY,
        livenessProbe=_ALIVE,
    )
    return pod_template(
        context,
        options,
        component=names.GENERATION,
        container=main,
        volumes=volumes,
        grace_seconds=GRACE_SECONDS,
        restart_policy="Always",
        over={"spec": over},
        annotations=STAYS,
        labels=_labels(context),
        pod_set=names.HEAD,
    )


def _of_ray(variables: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [dict(item) for item in variables if str(item.get("name")).startswith("RAY_")]


def _labels(context: RenderContext) -> dict[str, str]:
    """Our labels without app.kubernetes.io/name: KubeRay's Services of the head select by its own value."""
    found = names.labels(context.name, names.GENERATION)
    return {key: value for key, value in found.items() if key != "app.kubernetes.io/name"}


def _environment(context: RenderContext) -> list[Object]:
    balance = {"RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": BALANCE[context.job.spec.generation.routing]}
    own = {"HF_HOME": f"{STATE_DIRECTORY}/huggingface", "HOME": STATE_DIRECTORY}
    return [
        *(
            {"name": name, "value": value}
            for name, value in {**own, **dict(sorted((SERVE_ENVIRONMENT | balance).items()))}.items()
        ),
        *token_variables(context, *contract.SCOPES),
        *servers_token_variables(context),
        *access_token_variables(context),
    ]


def _volumes(*, shared_gib: int) -> Volumes:
    volumes = Volumes()
    volumes.add("state", STATE_DIRECTORY, {"emptyDir": {}})
    volumes.add("tmp", TEMPORARY_DIRECTORY, {"emptyDir": {}})
    volumes.add("shm", "/dev/shm", {"emptyDir": {"medium": "Memory", "sizeLimit": f"{shared_gib}Gi"}})
    return volumes


def _text(config: dict[str, Any]) -> str:
    """JSON, which is also YAML, with sorted keys."""
    return json.dumps(config, sort_keys=True, indent=1, ensure_ascii=False) + "\n"


def _shape(spec: dict[str, Any]) -> dict[str, Any]:
    """Everything that does not change in place."""
    config = json.loads(spec["serveConfigV2"])
    for application in config["applications"]:
        del application["deployments"]
    return {**spec, "serveConfigV2": config}
