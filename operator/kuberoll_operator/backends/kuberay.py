"""Backend KubeRay: a RayService, whose replicas may share pods, span pods, or be autoscaled by Ray Serve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from kuberoll_api.conditions import Reason
from kuberoll_api.contract import GENERATION_PORT, fewest_replicas
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_operator import names
from kuberoll_operator.backends.base import GenerationState
from kuberoll_operator.backends.pods import (
    PodProblem,
    any_active,
    diagnose,
    first_problem,
    holds_any,
    owner_problem,
    pods_of,
    redact,
    refusal,
)
from kuberoll_operator.model import Object, Observed, Ref, condition, is_true
from kuberoll_operator.placement import PlacementError, place, placement_problem
from kuberoll_operator.render.context import RenderContext
from kuberoll_operator.render.generation import build_generation_services
from kuberoll_operator.render.hosting import Hosting, namespaced, tcp
from kuberoll_operator.render.rayservice import build_rayservice, keep_cluster
from kuberoll_operator.render.workload import PodSet
from kuberoll_operator.settings import Settings
from kuberoll_operator.waiting.questions import ray_cluster_of

_SERVE_LABEL: Final = "ray.io/serve"
_READY: Final = "Ready"
_BROKEN: Final = frozenset({"DEPLOY_FAILED", "UNHEALTHY"})
_WITHOUT_REPLICAS: Final = frozenset({"NOT_STARTED", "DELETING"})


class KubeRay:
    """A RayService and our Services; needs KubeRay in the cluster."""

    name = "KubeRay"
    in_job = True
    weights_from: Final = "Serve"

    def problem(self, job: RolloutJob, settings: Settings) -> str | None:
        if settings.kuberay is False:
            return (
                "spec.generation.backend: KubeRay is not installed (the cluster does not serve ray.io/v1 rayservices); "
                "install it, or set Native"
            )
        return placement_problem(job.spec.generation, one_per_pod=False)

    def hosting(self, job: RolloutJob, namespace: str, settings: Settings) -> Hosting:
        # KubeRay's operator calls Ray's dashboard, and ours asks Serve for the weights of its replicas.
        kuberay: Object = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}}
        visitors = [
            {"ports": [tcp(names.RAY_DASHBOARD_PORT)], "from": [{**namespaced(settings.kuberay_namespace), **kuberay}]},
            {"ports": [tcp(GENERATION_PORT)], "from": [namespaced(settings.lease_namespace)]},
        ]
        return Hosting(
            endpoint=names.generation_url(job.metadata.name, namespace),
            replica_ports=names.REPLICA_PORTS,
            # KubeRay creates such a Service, too, but only once the first cluster runs: by then, resolvers would have
            # cached that the name does not exist.
            service_labels={_SERVE_LABEL: "true"},
            visitors=visitors,
        )

    def fixtures(self, context: RenderContext) -> Sequence[Object]:
        return build_generation_services(context)

    def engines(self, context: RenderContext, observed: Observed, now: datetime) -> Sequence[Object]:  # noqa: ARG002
        live = observed.get("RayService", names.ray_service(context.name))
        if live is not None and (_is_dying(live) or _timed_out(live)):
            return []
        placement = place(context.job.spec.generation, one_per_pod=False)
        return [keep_cluster(build_rayservice(context, placement), live)]

    def pod_sets(self, context: RenderContext) -> Sequence[PodSet]:
        cluster = build_rayservice(context, place(context.job.spec.generation, one_per_pod=False))["spec"][
            "rayClusterConfig"
        ]
        [group] = cluster["workerGroupSpecs"]
        return [
            PodSet(names.HEAD, 1, cluster["headGroupSpec"]["template"]),
            PodSet(names.GENERATION, group["maxReplicas"], group["template"]),
        ]

    def outdated(self, job: RolloutJob, observed: Observed) -> Sequence[Ref]:
        live = observed.get("RayService", names.ray_service(job.metadata.name))
        return self.engine_refs(job) if live is not None and _timed_out(live) else []

    def engine_refs(self, job: RolloutJob) -> Sequence[Ref]:
        return [Ref("ray.io/v1", "RayService", names.ray_service(job.metadata.name))]

    def state(
        self,
        job: RolloutJob,
        observed: Observed,
        *,
        paid_for: int | None = None,  # noqa: ARG002
    ) -> GenerationState:
        live = observed.get("RayService", names.ray_service(job.metadata.name))
        pods = pods_of(observed.pods, names.GENERATION)
        status = (live.get("status") or {}) if live is not None and not _is_dying(live) else {}
        desired = self._desired(job, pods)
        full = _is_complete(status)
        found = first_problem(
            (
                _failure(status),
                diagnose(pods, "generation", observed.signs),
                owner_problem(observed.signs, "RayCluster", ray_cluster_of(live or {})),
                _unfinished(status),
            )
        )
        ready = desired if full else self._answering(job, pods, desired, status)
        return GenerationState(
            ready=ready,
            desired=desired,
            reason=found.reason if found else Reason.STARTING,
            message=found.message if found else "",
            repeats=found is not None and found.repeats,
            refused=_refused(status) or refusal(pods, "generation"),
            released=live is None and not holds_any(pods),
            # A status from before the last change describes the old state, and does so for a few seconds after the
            # change.
            stable=full and live is not None and _is_seen(live, status),
            note=_scaling(job),
        )

    def _desired(self, job: RolloutJob, pods: Sequence[Object]) -> int:
        """Number of replicas that are wanted; with autoscaling, as many as there are pods for."""
        spec = job.spec.generation
        if spec.autoscaling is None:
            return spec.replicas or 1
        there = self._replicas(job, [pod for pod in pods if _is_engine(pod) and any_active([pod])])
        return min(spec.autoscaling.max_replicas, max(fewest_replicas(spec.autoscaling), there))

    def _answering(self, job: RolloutJob, pods: Sequence[Object], desired: int, status: Mapping[str, Any]) -> int:
        """Replicas that answer while not all do.

        Only Serve knows their number; KubeRay knows the pods that may hold some.

        After a failed change the old replicas keep running; while one is replaced, the others do.
        """
        applications = _applications(status)
        told_of = {str(item.get("status")) for item in applications.values()}
        if not told_of or told_of & _WITHOUT_REPLICAS or not is_true(status, _READY):
            return 0
        there = self._replicas(
            job, [pod for pod in pods if _is_engine(pod) and is_true(pod.get("status") or {}, "Ready")]
        )
        broken = any(item in _BROKEN for item, _ in _statements(status))
        # A pod that is starved of CPU for a moment is not ready, but its replica keeps running.
        return min(desired, max(there, 0 if broken else 1))

    def _replicas(self, job: RolloutJob, pods: Sequence[Object]) -> int:
        try:
            return place(job.spec.generation, one_per_pod=False).replicas(len(pods))
        except PlacementError:
            return 0


def _scaling(job: RolloutJob) -> str:
    spec = job.spec.generation.autoscaling
    if spec is None:
        return ""
    return (
        f"Ray Serve scales them from {fewest_replicas(spec)} to {spec.max_replicas}, at "
        f"{spec.target_ongoing_requests:g} turns each"
    )


def _is_complete(status: Mapping[str, Any]) -> bool:
    """True if all applications and deployments run.

    KubeRay's own condition Ready becomes True as soon as any proxy answers.
    """
    applications = _applications(status)
    running = bool(applications) and all(_is_running(item) for item in applications.values())
    return running and is_true(status, _READY)


def _is_seen(live: Object, status: Mapping[str, Any]) -> bool:
    return int(status.get("observedGeneration") or 0) >= int(live["metadata"].get("generation") or 0)


def _is_running(application: Mapping[str, Any]) -> bool:
    deployments = application.get("serveDeploymentStatuses") or {}
    healthy = bool(deployments) and all(item.get("status") == "HEALTHY" for item in deployments.values())
    return application.get("status") == "RUNNING" and healthy


def _failure(status: Mapping[str, Any]) -> PodProblem | None:
    """Failure of an engine as Serve reports it, mostly a traceback."""
    ready = condition(status, _READY)
    if ready.get("reason") == "InitializingTimeout":
        return PodProblem(
            Reason.STARTING, redact(f"KubeRay timed out; recreating the RayService: {ready.get('message', '')}")
        )
    broken = [item for item in _statements(status) if item[0] in _BROKEN and item[1]]
    return PodProblem(Reason.ENGINE_FAILED, redact(_joined(broken))) if broken else None


def _unfinished(status: Mapping[str, Any]) -> PodProblem | None:
    """Message of the applications that Serve is still deploying; None if there are none."""
    pending = [item for item in _statements(status) if item[0] not in {"RUNNING", "HEALTHY"} and item[1]]
    return PodProblem(Reason.STARTING, redact(_joined(pending))) if pending else None


def _joined(statements: Sequence[tuple[str, str]]) -> str:
    return "; ".join(dict.fromkeys(f"{status}: {message}" for status, message in statements))


def _statements(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Status and message of deployments and applications; deployments first, because they are closer to the cause."""
    applications = _applications(status)
    parts = [item.get("serveDeploymentStatuses") or {} for _, item in sorted(applications.items())]
    for group in (*parts, applications):
        for _, item in sorted(group.items()):
            yield str(item.get("status", "")), str(item.get("message") or "").strip()


def _applications(status: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Applications of the serving cluster, else of the pending one."""
    for part in ("activeServiceStatus", "pendingServiceStatus"):
        if found := (status.get(part) or {}).get("applicationStatuses"):
            return found  # type: ignore[no-any-return]
    return {}


def _refused(status: Mapping[str, Any]) -> str | None:
    ready = condition(status, _READY)
    if ready.get("reason") != "ValidationFailed":
        return None
    return redact(f"KubeRay rejected the RayService: {ready.get('message', '')}")


def _timed_out(live: Object) -> bool:
    """True if KubeRay has stopped starting it; no change of its spec revives it."""
    ready = condition(live.get("status") or {}, _READY)
    return ready.get("status") == "False" and ready.get("reason") == "InitializingTimeout"


def _is_dying(live: Object) -> bool:
    return bool(live["metadata"].get("deletionTimestamp"))


def _is_engine(pod: Object) -> bool:
    return (pod["metadata"].get("labels") or {}).get(_SERVE_LABEL) == "true" and not _is_dying(pod)
