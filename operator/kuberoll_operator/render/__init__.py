"""Rendering of a job's children: pure functions of the job and the settings; equal input gives equal bytes."""

from kuberoll_operator.render.access import build_access_secrets
from kuberoll_operator.render.check import build_check_job
from kuberoll_operator.render.config import build_config
from kuberoll_operator.render.context import RenderContext
from kuberoll_operator.render.environments import (
    build_environment_deployments,
    build_environment_fixtures,
    build_sandbox_claims,
    environment_pod_sets,
)
from kuberoll_operator.render.finish import build_finish_job
from kuberoll_operator.render.generation import (
    build_generation_deployment,
    build_generation_groups,
    build_generation_services,
)
from kuberoll_operator.render.network import build_network_policies
from kuberoll_operator.render.objects import seal
from kuberoll_operator.render.policy_access import build_policy_access
from kuberoll_operator.render.rayservice import build_rayservice
from kuberoll_operator.render.sandbox_quota import sandbox_pod_sets
from kuberoll_operator.render.sandboxes import any_network, build_sandbox_secret
from kuberoll_operator.render.servers import build_environment_secret
from kuberoll_operator.render.service_tokens import build_service_secret
from kuberoll_operator.render.services import build_service_deployments, build_service_fixtures, service_pod_sets
from kuberoll_operator.render.tokens import build_token_secrets
from kuberoll_operator.render.workers import build_workers_job, build_workers_service
from kuberoll_operator.render.workload import Priority, build_workload

__all__ = [
    "Priority",
    "RenderContext",
    "any_network",
    "build_access_secrets",
    "build_check_job",
    "build_config",
    "build_environment_deployments",
    "build_environment_fixtures",
    "build_environment_secret",
    "build_finish_job",
    "build_generation_deployment",
    "build_generation_groups",
    "build_generation_services",
    "build_network_policies",
    "build_policy_access",
    "build_rayservice",
    "build_sandbox_claims",
    "build_sandbox_secret",
    "build_service_deployments",
    "build_service_fixtures",
    "build_service_secret",
    "build_token_secrets",
    "build_workers_job",
    "build_workers_service",
    "build_workload",
    "environment_pod_sets",
    "sandbox_pod_sets",
    "seal",
    "service_pod_sets",
]
