"""Pods of services, further served models: a Deployment and a Service for each, in which vLLM's own server runs."""

from __future__ import annotations

from typing import Any, Final

from kuberoll_api import contract
from kuberoll_api.model.pods import PodOptions, Resources
from kuberoll_api.model.services import GPU, ModelService
from kuberoll_operator import names
from kuberoll_operator.model import Object
from kuberoll_operator.render.context import RenderContext
from kuberoll_operator.render.generation import GRACE_SECONDS, MUTABLE, PROBE_SECONDS, STRATEGY
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
from kuberoll_operator.render.service_tokens import key_variable
from kuberoll_operator.render.workload import PodSet

KEY_VARIABLE: Final = "VLLM_API_KEY"
"""Variable of the server with the key that its requests need."""


def build_service_fixtures(context: RenderContext) -> list[Object]:
    """Service <job>-service-<number> of each service."""
    found: list[Object] = []
    for number, service in enumerate(context.job.spec.services):
        child = context.child("v1", "Service", names.service(context.name, number), names.SERVICE)
        child["spec"] = {
            "type": "ClusterIP",
            "ports": [{"name": "http", "port": contract.SERVICE_PORT, "targetPort": "http"}],
            "selector": names.service_selector(context.name, service.name),
        }
        found.append(child)
    return found


def build_service_deployments(context: RenderContext) -> list[Object]:
    """Deployment <job>-service-<number> of each service."""
    return [_deployment(context, number, service) for number, service in enumerate(context.job.spec.services)]


def service_pod_sets(context: RenderContext) -> list[PodSet]:
    """Pod sets of the services."""
    return [
        PodSet(service_pod_set(number), service.replicas, _template(context, number, service))
        for number, service in enumerate(context.job.spec.services)
    ]


def service_pod_set(number: int) -> str:
    """Name of the pod set of a service."""
    return f"{names.SERVICE}-{number}"


def _deployment(context: RenderContext, number: int, service: ModelService) -> Object:
    assignment = context.assignments.get(service_pod_set(number))
    paid_for = None if assignment is None else assignment.count
    child = context.child("apps/v1", "Deployment", names.service(context.name, number), names.SERVICE)
    child["spec"] = {
        "progressDeadlineSeconds": context.job.spec.startup_deadline_seconds,
        "replicas": service.replicas if paid_for is None else min(service.replicas, paid_for),
        "revisionHistoryLimit": 0,
        "selector": {"matchLabels": names.service_selector(context.name, service.name)},
        "strategy": STRATEGY,
        "template": _template(context, number, service),
    }
    return shaped(child, MUTABLE)


def _template(context: RenderContext, number: int, service: ModelService) -> Object:
    options = _options(service)
    volumes = engine_volumes(context)
    # vLLM answers there once the model is loaded, and fails when its engine has died.
    probe: dict[str, Any] = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": PROBE_SECONDS}
    main = container(
        context,
        options,
        name="service",
        module="kuberoll_workers.pods.service",
        arguments=("--service", service.name),
        image=context.settings.generation_image,
        env=[*STATE_VARIABLES, POD_IP, key_variable(context, KEY_VARIABLE, number)],
        volumes=volumes,
        read_only=False,
        ports=[{"name": "http", "containerPort": contract.SERVICE_PORT}],
        startupProbe={
            **probe,
            "timeoutSeconds": 5,
            "failureThreshold": -(-context.job.spec.startup_deadline_seconds // PROBE_SECONDS),
        },
        readinessProbe={**probe, "timeoutSeconds": 5, "periodSeconds": 5, "failureThreshold": 2},
        livenessProbe={**probe, "timeoutSeconds": 10, "failureThreshold": 6},
    )
    template = pod_template(
        context,
        options,
        component=names.SERVICE,
        container=main,
        volumes=volumes,
        grace_seconds=GRACE_SECONDS,
        restart_policy="Always",
        over=options.pod_template,
        annotations=STAYS,
        apart=spread(names.service_selector(context.name, service.name)),
        labels={**names.labels(context.name, names.SERVICE), names.SERVICE_LABEL: service.name},
        pod_set=service_pod_set(number),
    )
    return with_model_cache(context, template, service.model, service.engine_args, container="service")


def _options(service: ModelService) -> PodOptions:
    """The options of its pods, with the GPUs that `gpusPerReplica` gives them."""
    if service.gpus_per_replica is None:
        return service
    limits = {**service.resources.limits, GPU: service.gpus_per_replica}
    resources = Resources(limits=limits, requests=service.resources.requests)
    return service.model_copy(update={"resources": resources})
