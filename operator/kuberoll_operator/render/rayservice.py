"""The RayService of backend KubeRay: a head without GPU, one group of pods for the engines, and what Serve runs there.

A change of `rayClusterConfig` is a second cluster of GPUs beside the first, or none at all with upgrades off; only
`serveConfigV2` changes in place. So these bytes depend on the job and the settings, and what runs keeps its own.
"""

from __future__ import annotations

import dataclasses
import json
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
from kuberoll_operator.render.config import STATE_DIRECTORY
from kuberoll_operator.render.context import RenderContext
from kuberoll_operator.render.generation import GRACE_SECONDS
from kuberoll_operator.render.objects import annotated, annotation, digest
from kuberoll_operator.render.pods import TEMPORARY_DIRECTORY, Volumes, container, pod_template
from kuberoll_operator.render.tokens import token_variables

GROUP: Final = "engines"

INITIALIZING_TIMEOUT: Final = "ray.io/initializing-timeout"
"""KubeRay's annotation: a RayService that is not ready by then never becomes so."""

SERVE_ENVIRONMENT: Final = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # A proxy that learns of another replica starts anew, and ends requests older than this.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
    # Workers ask every few seconds which replicas there are, and know by then that this one goes.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "10",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Read by Serve's controller on the head and its proxies everywhere: the same for all of them."""

BALANCE: Final = {"Session": "hdr(x-session-id)", "LeastLoaded": "leastconn"}
"""How proxies choose for those who do not choose for themselves."""

HEAD_RESOURCES: Final = {"limits": {"memory": "4Gi"}, "requests": {"cpu": "500m", "memory": "2Gi"}}

# Of which Serve keeps next to nothing, and /dev/shm is for the engines.
HEALTH_PORT: Final = 52365
"""Port of Ray's dashboard agent, which has `/api/healthz` since Ray 2.53."""

# KubeRay gives every container without a probe one of its own, and the one of an engine's readiness runs wget and bash
# in the image. The numbers are KubeRay's (1.7), but for one failure that makes an engine unready: a proxy that is late
# once, because the node is busy, is there all the same.
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

_OBJECT_STORE_BYTES: Final = 256 * 1024**2
_TOKEN_SINCE: Final = (2, 52)


def build_rayservice(subject: RenderContext, placement: Placement) -> Object:
    """RayService <job>-gen."""
    child = subject.child("ray.io/v1", "RayService", names.ray_service(subject.name), names.GENERATION)
    deadline = f"{subject.job.spec.startup_deadline_seconds}s"
    made = annotated(child, {INITIALIZING_TIMEOUT: deadline})
    made["spec"] = {
        "excludeHeadPodFromServeSvc": True,
        "rayClusterConfig": _cluster(subject, placement),
        "serveConfigV2": _text(serve_config(subject, placement)),
        # A second cluster would wait for GPUs that the first has.
        "upgradeStrategy": {"type": "None"},
    }
    return annotated(made, {names.SHAPE_DIGEST: digest(_shape(made["spec"]))})


def keep_cluster(rendered: Object, live: Object | None) -> Object:
    """A RayService over one that runs: of it only the weights, and KubeRay's deadline, are as rendered.

    What runs is not started anew because the operator was given another default image.
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


def serve_config(subject: RenderContext, placement: Placement) -> dict[str, Any]:
    """What Serve is told: `serveConfigV2` before it is a text."""
    wanted = weights_source(subject.job.spec.weights)
    application = {
        "name": APPLICATION,
        "import_path": IMPORT_PATH,
        "route_prefix": "/",
        "args": serve_args(subject, placement),
        # In place, in every replica, and in those that come later: another argument would load all engines anew.
        "deployments": [{"name": DEPLOYMENT, "user_config": user_config(wanted)}],
    }
    return {
        "applications": [application],
        "http_options": {"host": "0.0.0.0", "port": contract.GENERATION_PORT},
        # KubeRay takes a pod without a proxy for one that is not ready.
        "proxy_location": "EveryNode",
    }


def serve_args(subject: RenderContext, placement: Placement) -> dict[str, Any]:
    """The arguments of the Serve application; what is as by default is left out."""
    generation = subject.job.spec.generation
    args = ServeArgs.of(generation, gpus=placement.gpus, bundles=placement.bundles(), tokens_required=True)
    fields = dataclasses.asdict(args)
    if generation.autoscaling is not None:
        # Serve takes the one or the other.
        del fields["replicas"]
    always = {"engine_args", "max_ongoing_requests", "replicas"}
    defaults = dataclasses.asdict(ServeArgs(model="", tokenizer="", engine=""))
    return {key: value for key, value in fields.items() if key in always or value != defaults[key]}


def _cluster(subject: RenderContext, placement: Placement) -> dict[str, Any]:
    generation = subject.job.spec.generation
    scales = generation.autoscaling is not None
    cluster: dict[str, Any] = {
        "rayVersion": subject.settings.ray_version,
        "headGroupSpec": {
            "rayStartParams": {
                "dashboard-host": "0.0.0.0",
                # Nothing but Serve's own actors, which ask for none.
                "num-cpus": "0",
                "num-gpus": "0",
                "object-store-memory": str(_OBJECT_STORE_BYTES),
            },
            "template": _head(subject, service_account=scales),
        },
        "workerGroupSpecs": [_group(subject, placement)],
    }
    if tuple(int(part) for part in subject.settings.ray_version.split(".")[:2]) >= _TOKEN_SINCE:
        cluster["authOptions"] = {"mode": "token"}
    if scales:
        cluster["enableInTreeAutoscaling"] = True
        cluster["autoscalerOptions"] = {
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        }
    return cluster


def _group(subject: RenderContext, placement: Placement) -> dict[str, Any]:
    generation = subject.job.spec.generation
    spec = generation.autoscaling
    fewest, most = (fewest_replicas(spec), spec.max_replicas) if spec else 2 * (generation.replicas or 1,)
    return {
        "groupName": GROUP,
        "replicas": placement.pods(fewest),
        "minReplicas": placement.pods(fewest),
        "maxReplicas": placement.pods(most),
        "rayStartParams": {
            # One for each replica, which asks for one, whatever the pod's CPU limit is.
            "num-cpus": str(placement.per_pod),
            "object-store-memory": str(_OBJECT_STORE_BYTES),
        },
        "template": _engines(subject, placement),
    }


def _engines(subject: RenderContext, placement: Placement) -> Object:
    options = subject.job.spec.generation
    # Each process of a model that is spread over GPUs hands the others its part through shared memory.
    volumes = _volumes(shared_gib=1 + max(1, placement.pod_gpus))
    main = container(
        subject,
        options,
        name="generation",
        module=None,
        image=subject.settings.generation_image,
        env=_environment(subject),
        volumes=volumes,
        read_only=False,
        ports=[
            {"name": "serve", "containerPort": contract.GENERATION_PORT},
            {"name": "metrics", "containerPort": contract.STATUS_PORT},
        ],
        readinessProbe=_ENGINE_READY,
        livenessProbe=_ALIVE,
    )
    return pod_template(
        subject,
        options,
        component=names.GENERATION,
        container=main,
        volumes=volumes,
        grace_seconds=GRACE_SECONDS,
        restart_policy="Always",
        over=options.pod_template,
        labels=_labels(subject),
    )


def _head(subject: RenderContext, *, service_account: bool) -> Object:
    """The head, which holds no model: of the job's wishes for its pods only those that are about the image.

    Args:
        service_account: Ray's autoscaler beside it talks to the API server, by an account that KubeRay makes.
    """
    generation = subject.job.spec.generation
    fields = {"image", "image_pull_secrets", "priority_class_name", "env"}
    taken = generation.model_dump(mode="json", by_alias=True, include=fields, exclude_none=True)
    # What Ray reads must be the same everywhere; nothing else of the engines' variables is needed here.
    taken["env"] = [item for item in taken["env"] if item["name"].startswith("RAY_")]
    options = PodOptions.model_validate(taken)
    volumes = _volumes(shared_gib=1)
    main = container(
        subject,
        options,
        name="head",
        module=None,
        image=subject.settings.generation_image,
        env=_environment(subject),
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
        subject,
        options,
        component=names.GENERATION,
        container=main,
        volumes=volumes,
        grace_seconds=GRACE_SECONDS,
        restart_policy="Always",
        over={"spec": {"automountServiceAccountToken": True}} if service_account else None,
        labels=_labels(subject),
        pod_set=names.HEAD,
    )


def _labels(subject: RenderContext) -> dict[str, str]:
    """Ours, but for the name: KubeRay's own Services of the head select by the one that it gives."""
    found = names.labels(subject.name, names.GENERATION)
    return {key: value for key, value in found.items() if key != "app.kubernetes.io/name"}


def _environment(subject: RenderContext) -> list[Object]:
    balance = {"RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": BALANCE[subject.job.spec.generation.routing]}
    own = {"HF_HOME": f"{STATE_DIRECTORY}/huggingface", "HOME": STATE_DIRECTORY}
    return [
        *(
            {"name": name, "value": value}
            for name, value in {**own, **dict(sorted((SERVE_ENVIRONMENT | balance).items()))}.items()
        ),
        *token_variables(subject, *contract.SCOPES),
    ]


def _volumes(*, shared_gib: int) -> Volumes:
    volumes = Volumes()
    volumes.add("state", STATE_DIRECTORY, {"emptyDir": {}})
    volumes.add("tmp", TEMPORARY_DIRECTORY, {"emptyDir": {}})
    volumes.add("shm", "/dev/shm", {"emptyDir": {"medium": "Memory", "sizeLimit": f"{shared_gib}Gi"}})
    return volumes


def _text(config: dict[str, Any]) -> str:
    """JSON, which is YAML: one order of keys, one way to write a number."""
    return json.dumps(config, sort_keys=True, indent=1, ensure_ascii=False) + "\n"


def _shape(spec: dict[str, Any]) -> dict[str, Any]:
    """Everything but what changes in place."""
    config = json.loads(spec["serveConfigV2"])
    for application in config["applications"]:
        del application["deployments"]
    return {**spec, "serveConfigV2": config}
