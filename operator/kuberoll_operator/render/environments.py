"""Servers of environments with isolation Remote: a Deployment with a ConfigMap, or claims, and a headless Service.

Workers call the pods one by one, because an episode with state of its own stays with the server that has reset it: the
addresses of the Service are the pods that are ready, those of claimed sandboxes too.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Final

from kuberoll_api import contract
from kuberoll_api.contract import EnvironmentPodConfig
from kuberoll_api.model.environments import Environment, EnvironmentSandboxes
from kuberoll_operator import names
from kuberoll_operator.kube.resources import SANDBOX_CLAIMS
from kuberoll_operator.model import Object
from kuberoll_operator.render.config import FILES_DIRECTORY, STATE_DIRECTORY
from kuberoll_operator.render.context import RenderContext
from kuberoll_operator.render.objects import shaped
from kuberoll_operator.render.pods import POD_IP, TEMPORARY_DIRECTORY, Volumes, container, pod_template
from kuberoll_operator.render.policy_access import policy_access_names, policy_access_variables
from kuberoll_operator.render.server_files import server_files
from kuberoll_operator.render.servers import claim_names, claimed, deployed, served, server_token_variable, servers_of
from kuberoll_operator.render.workload import PodSet

MUTABLE: Final = frozenset({"replicas", "progressDeadlineSeconds"})
"""Fields of a Deployment that may change without restarting its pods."""

CONFIG_DIRECTORY: Final = "/etc/kuberoll-environment"
CONFIG_KEY: Final = "environment.json"
GRACE_SECONDS: Final = 40
_PROBE_SECONDS: Final = 5


def build_environment_fixtures(context: RenderContext) -> list[Object]:
    """Service <job>-env-<number> of each environment with servers, and a ConfigMap unless they are claimed."""
    return [
        *(_config_map(context, number, spec) for number, spec in deployed(context.job)),
        *(_service(context, number, spec) for number, spec in served(context.job)),
    ]


def build_environment_deployments(context: RenderContext) -> list[Object]:
    """Deployment <job>-env-<number> of each environment with server pods."""
    return [_deployment(context, number, spec) for number, spec in deployed(context.job)]


def build_sandbox_claims(context: RenderContext) -> list[Object]:
    """SandboxClaims <job>-env-<number>-<index>, one for each server in a sandbox."""
    return [
        _claim(context, name, spec, sandbox)
        for number, spec, sandbox in claimed(context.job)
        for name in claim_names(context.job, number, spec)
    ]


def environment_pod_sets(context: RenderContext) -> list[PodSet]:
    """Pod sets of the server pods; sandboxes of a warm pool have their resources already."""
    return [
        PodSet(pod_set(number), servers_of(spec).replicas, _template(context, number, spec))
        for number, spec in deployed(context.job)
    ]


def pod_set(number: int) -> str:
    """Name of the pod set of an environment's server pods."""
    return f"{names.ENVIRONMENT}-{number}"


def _config_map(context: RenderContext, number: int, spec: Environment) -> Object:
    text = json.dumps(_short(_config_of(context, spec)), sort_keys=True, indent=1, ensure_ascii=False)
    child = context.child("v1", "ConfigMap", names.environment(context.name, number), names.ENVIRONMENT)
    return {**child, "data": {CONFIG_KEY: f"{text}\n"}}


def _service(context: RenderContext, number: int, spec: Environment) -> Object:
    own = servers_of(spec).sandbox is None
    select = names.environment_selector if own else names.claimed_selector
    # What a template calls its ports is not known.
    target: int | str = "http" if own else contract.ENVIRONMENT_PORT
    child = context.child("v1", "Service", names.environment(context.name, number), names.ENVIRONMENT)
    child["spec"] = {
        "clusterIP": "None",
        "ports": [{"name": "http", "port": contract.ENVIRONMENT_PORT, "targetPort": target}],
        "selector": select(context.name, spec.name),
    }
    return child


def claim_config(context: RenderContext, spec: Environment) -> str:
    """Configuration of a claimed sandbox, as JSON: it comes in an annotation of the pod, which may run already.

    Anybody who may read pods reads it, so it has the token's digest. The pod has no files of the job's own.
    """
    config = dataclasses.replace(
        _config_of(context, spec),
        modules=None,
        token_digest=contract.token_digest(context.environment_tokens[spec.name]),
    )
    return json.dumps(_short(config), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _claim(context: RenderContext, name: str, spec: Environment, sandbox: EnvironmentSandboxes) -> Object:
    child = context.child(SANDBOX_CLAIMS.api_version, SANDBOX_CLAIMS.kind, name, names.ENVIRONMENT)
    child["metadata"]["labels"][names.ENVIRONMENT_LABEL] = spec.name
    child["spec"] = {
        "additionalPodMetadata": {
            "annotations": {contract.ENVIRONMENT_ANNOTATION: claim_config(context, spec)},
            "labels": names.claimed_selector(context.name, spec.name),
        },
        "warmPoolRef": {"name": sandbox.warm_pool},
    }
    # The pod has read its configuration: another one would only be annotated.
    return shaped(child, ())


def _short(config: EnvironmentPodConfig) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(config).items() if value not in (None, [])}


def _config_of(context: RenderContext, spec: Environment) -> EnvironmentPodConfig:
    kind, entrypoint, config = spec.constructor
    return EnvironmentPodConfig(
        job=context.name,
        name=spec.name,
        type=kind,
        entrypoint=entrypoint,
        config=config,
        processes=spec.processes,
        spare_processes=spec.call_spares,
        step_timeout_seconds=spec.call_seconds,
        modules=None if server_files(context.job, spec) is None else FILES_DIRECTORY,
        variables=[*spec.access.variables, *policy_access_names(spec)],
        readable_paths=spec.access.readable_paths,
        writable_paths=spec.access.writable_paths,
    )


def _deployment(context: RenderContext, number: int, spec: Environment) -> Object:
    name = names.environment(context.name, number)
    assignment = context.assignments.get(pod_set(number))
    paid_for = None if assignment is None else assignment.count
    replicas = servers_of(spec).replicas
    child = context.child("apps/v1", "Deployment", name, names.ENVIRONMENT)
    child["spec"] = {
        "progressDeadlineSeconds": context.job.spec.startup_deadline_seconds,
        "replicas": replicas if paid_for is None else min(replicas, paid_for),
        "revisionHistoryLimit": 0,
        "selector": {"matchLabels": names.environment_selector(context.name, spec.name)},
        "template": _template(context, number, spec),
    }
    return shaped(child, MUTABLE)


def _template(context: RenderContext, number: int, spec: Environment) -> Object:
    servers = servers_of(spec)
    volumes = Volumes()
    config = {"configMap": {"name": names.environment(context.name, number)}}
    volumes.add("config", CONFIG_DIRECTORY, config, read_only=True)
    volumes.add("state", STATE_DIRECTORY, {"emptyDir": {}})
    volumes.add("tmp", TEMPORARY_DIRECTORY, {"emptyDir": {}})
    if (files := server_files(context.job, spec)) is not None:
        named = files.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        volumes.add("files", FILES_DIRECTORY, {"configMap": named}, read_only=True)
    probe = {"httpGet": {"path": "/healthz", "port": "http"}, "timeoutSeconds": 5, "periodSeconds": _PROBE_SECONDS}
    main = container(
        context,
        servers,
        name="environment",
        module=None,
        image=context.settings.worker_image,
        env=[
            {"name": "HF_HOME", "value": f"{STATE_DIRECTORY}/huggingface"},
            {"name": "HOME", "value": STATE_DIRECTORY},
            POD_IP,
            server_token_variable(context, contract.ENVIRONMENT_TOKEN, number),
            *policy_access_variables(context, spec),
        ],
        volumes=volumes,
        read_only=True,
        command=["python", "-m", "kuberoll_workers.pods.environment", "--config", f"{CONFIG_DIRECTORY}/{CONFIG_KEY}"],
        ports=[{"name": "http", "containerPort": contract.ENVIRONMENT_PORT}],
        # Requests are answered when the environment has been created.
        startupProbe={**probe, "failureThreshold": -(-context.job.spec.startup_deadline_seconds // _PROBE_SECONDS)},
        readinessProbe={**probe, "failureThreshold": 2},
        # A server that drains is not ready, but alive.
        livenessProbe={"tcpSocket": {"port": "http"}, "timeoutSeconds": 5, "periodSeconds": 10, "failureThreshold": 6},
    )
    return pod_template(
        context,
        servers,
        component=names.ENVIRONMENT,
        container=main,
        volumes=volumes,
        grace_seconds=GRACE_SECONDS,
        restart_policy="Always",
        over=servers.pod_template,
        labels={**names.labels(context.name, names.ENVIRONMENT), names.ENVIRONMENT_LABEL: spec.name},
        pod_set=pod_set(number),
    )
