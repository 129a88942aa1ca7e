"""The generation pods of backend Native: a Deployment whose every pod is a Ray of its own, and its Services."""

from __future__ import annotations

from typing import Any, Final

from kuberoll_operator import names
from kuberoll_operator.model import Object
from kuberoll_operator.render.config import STATE_DIRECTORY
from kuberoll_operator.render.objects import shaped
from kuberoll_operator.render.pods import container, pod_template, standard_volumes
from kuberoll_operator.render.subject import Subject

MUTABLE: Final = frozenset({"replicas", "progressDeadlineSeconds"})
"""What of the Deployment changes without a new engine."""

SERVE_LABEL: Final = "ray.io/serve"
"""KubeRay's: "true" on pods of engines, "false" on the head."""

GRACE_SECONDS: Final = 60
PROBE_SECONDS: Final = 10


def build_generation_deployment(subject: Subject, *, replicas: int) -> Object:
    """Deployment <job>-generation.

    It never has more pods than replicas: an engine that waits for a second GPU would wait for ever. Weights are no part
    of it: pods read them in the configuration that they have mounted, and go on.
    """
    spec = subject.job.spec
    options = spec.generation
    volumes = standard_volumes(subject)
    volumes.add("shm", "/dev/shm", {"emptyDir": {"medium": "Memory"}})
    # Serve's own paths on the port of the policy are right too early, or wait behind generation: the pod's process
    # answers for itself.
    ready = {"httpGet": {"path": "/healthz", "port": "metrics"}, "timeoutSeconds": 5}
    alive = {"httpGet": {"path": "/livez", "port": "metrics"}, "timeoutSeconds": 10}
    main = container(
        subject,
        options,
        name="generation",
        module="kuberoll_workers.policy.pod",
        image=subject.settings.generation_image,
        env=[
            {"name": "HF_HOME", "value": f"{STATE_DIRECTORY}/huggingface"},
            {"name": "HOME", "value": STATE_DIRECTORY},
        ],
        volumes=volumes,
        read_only=False,
        ports=[
            {"name": "http", "containerPort": names.GENERATION_PORT},
            {"name": "metrics", "containerPort": names.RAY_METRICS_PORT},
        ],
        startupProbe={
            **ready,
            "periodSeconds": PROBE_SECONDS,
            "failureThreshold": -(-spec.startup_deadline_seconds // PROBE_SECONDS),
        },
        readinessProbe={**ready, "periodSeconds": 5, "failureThreshold": 2},
        # An engine that does not come back is ended by its pod; this is for a process that hangs.
        livenessProbe={**alive, "periodSeconds": PROBE_SECONDS, "failureThreshold": 6},
    )
    template = pod_template(
        subject,
        options,
        component=names.GENERATION,
        container=main,
        volumes=volumes,
        grace_seconds=GRACE_SECONDS,
        restart_policy="Always",
        over=options.pod_template,
    )
    child = subject.child("apps/v1", "Deployment", names.generation(subject.name), names.GENERATION)
    child["spec"] = {
        "progressDeadlineSeconds": spec.startup_deadline_seconds,
        "replicas": replicas,
        "revisionHistoryLimit": 0,
        "selector": {"matchLabels": names.selector(subject.name, names.GENERATION)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        "template": template,
    }
    return shaped(child, MUTABLE)


def build_generation_services(subject: Subject) -> list[Object]:
    """Service <job>-generation, the endpoint, and <job>-generation-pods, each pod by itself.

    The addresses of the second are the replicas that workers talk to: those of pods that are ready.
    """
    http = {"name": "http", "port": names.GENERATION_PORT, "targetPort": names.GENERATION_PORT}
    metrics = {"name": "metrics", "port": names.RAY_METRICS_PORT, "targetPort": names.RAY_METRICS_PORT}
    # KubeRay has a Service like the first, which is there only when the first cluster runs: workers and their
    # resolvers would have noted by then that there is none.
    serving = {SERVE_LABEL: "true"} if subject.backend == "KubeRay" else {}
    return [
        _service(subject, names.generation(subject.name), {"type": "ClusterIP", "ports": [http]}, serving),
        _service(subject, names.generation_pods(subject.name), {"clusterIP": "None", "ports": [http, metrics]}, {}),
    ]


def _service(subject: Subject, name: str, spec: dict[str, Any], labels: dict[str, str]) -> Object:
    child = subject.child("v1", "Service", name, names.GENERATION)
    return {**child, "spec": {**spec, "selector": {**names.selector(subject.name, names.GENERATION), **labels}}}
