"""Backend KubeRay: what its statuses come to, and what of a RayService changes when."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kuberoll_api import contract
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_operator import names
from kuberoll_operator.backends import BACKENDS
from kuberoll_operator.backends.base import GenerationState
from kuberoll_operator.facts import compute_facts
from kuberoll_operator.model import Object
from kuberoll_operator.placement import place
from kuberoll_operator.plan import plan
from kuberoll_operator.render import rayservice, seal
from kuberoll_operator.status.job_status import compute_status
from kuberoll_workers.policy.headers import SESSION_HEADER
from kuberoll_workers.serving import app
from kuberoll_workers.serving.engines.vllm_kind import placed_engine_args
from kuberoll_workers.serving.ray_settings import serve_environment
from tests.operator import support
from tests.operator.support import at, child, condition, job, observed, pod, raw, terminated, unschedulable
from tests.operator.test_render import CASES, children, context

KUBERAY = BACKENDS["KubeRay"]
READY = {"type": "Ready", "status": "True", "reason": "NonZeroServeEndpoints"}
INITIALIZING = {"type": "Ready", "status": "False", "reason": "Initializing"}
RAY_CASES = [case for case in CASES if case.startswith("kuberay")]


def application(status: str = "RUNNING", deployment: str = "HEALTHY", message: str = "", of: str = "") -> Object:
    deployments = {"Generation": {"status": deployment, "message": message}}
    return {"kuberoll": {"status": status, "message": of, "serveDeploymentStatuses": deployments}}


def service(
    applications: Object | None = None, ready: Object = READY, *, seen: int = 2, pending: bool = False, **metadata: Any
) -> Object:
    """A RayService; KubeRay has written it once more, so it is of generation 2."""
    part = "pendingServiceStatus" if pending else "activeServiceStatus"
    status = {"observedGeneration": seen, "conditions": [ready], part: {"applicationStatuses": applications or {}}}
    return child("RayService", "puzzle-gen", status=status, generation=2, **metadata)


def engine(suffix: str, *, ready: bool = True, **more: Any) -> Object:
    conditions = [{"type": "Ready", "status": str(ready)}]
    found = pod("generation", suffix, conditions=more.pop("conditions", conditions), **more)
    found["metadata"]["labels"]["ray.io/serve"] = "true"
    return found


@pytest.mark.parametrize("case", RAY_CASES)
def test_no_pod_is_left_to_kuberays_probes_which_need_wget_in_the_image(case: str) -> None:
    cluster = next(item for item in children(case) if item["kind"] == "RayService")["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        main = group["template"]["spec"]["containers"][0]
        for probe in ("livenessProbe", "readinessProbe"):
            assert set(main[probe]) >= {"httpGet"}
    engines = cluster["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    assert engines["readinessProbe"]["httpGet"] == {"path": "/-/healthz", "port": "serve"}
    assert {"name": "serve", "containerPort": 8000} in engines["ports"]


def ray_job(**generation: Any) -> RolloutJob:
    return job(generation={"backend": "KubeRay", **generation})


def state_of(live: Object | None, *pods: Object, **generation: Any) -> GenerationState:
    return KUBERAY.state(ray_job(**generation), observed(*([live] if live else []), pods=list(pods)))


def test_ready_is_when_all_that_was_asked_for_is_there() -> None:
    found = state_of(service(application()), engine("a"), engine("b"))
    assert (found.ready, found.desired, found.stable, found.released) == (2, 2, True, False)


@pytest.mark.parametrize(
    "live",
    [
        service(application("DEPLOYING", "UPDATING")),
        service(application("RUNNING", "UPDATING")),
        service(application("RUNNING", "UNHEALTHY")),
        service(application("DEPLOY_FAILED", "HEALTHY")),
        # Of before the change.
        service(application(), seen=1),
        # On an upgrade of KubeRay's the active cluster has none.
        service({}),
        service({"kuberoll": {"status": "RUNNING"}}),
    ],
)
def test_a_proxy_that_answers_is_not_enough(live: Object) -> None:
    found = state_of(live, engine("a"), engine("b"))
    assert not found.stable
    status = compute_status(
        compute_facts(ray_job(), raw(), observed(live, pods=[engine("a"), engine("b")]), support.SETTINGS, at(0))
    )
    assert status["phase"] == "Starting"


def test_what_answers_keeps_generation_ready_while_something_changes() -> None:
    old = {
        "startTime": support.stamp(0),
        "generation": {"backend": "KubeRay"},
        "conditions": [condition("GenerationReady", True, "Ready")],
    }
    live = service(application("RUNNING", "UNHEALTHY", message="a replica died"))
    facts = observed(live, support.workers_job(), pods=[engine("a"), engine("b", ready=False)])
    status = compute_status(compute_facts(ray_job(), raw(old), facts, support.SETTINGS, at(0)))
    ready = next(item for item in status["conditions"] if item["type"] == "GenerationReady")
    assert (ready["status"], status["generation"]["readyReplicas"]) == ("True", 1)
    assert ready["message"] == "1 of 2 replicas are ready; UNHEALTHY: a replica died"


def test_serves_own_words_are_told_without_secrets_and_not_at_length() -> None:
    trace = "Traceback: ValueError: bad dtype, hf_abcdefghijklmnop " + "x" * 5000
    found = state_of(service(application("DEPLOY_FAILED", "DEPLOY_FAILED", trace), INITIALIZING, pending=True))
    assert found.reason == "EngineFailed"
    assert found.message.startswith("DEPLOY_FAILED: Traceback: ValueError: bad dtype, [redacted]")
    assert len(found.message) <= 1000


def test_pods_that_cannot_start_are_told_of_before_what_serve_waits_for() -> None:
    waiting = service(application("DEPLOYING", "UPDATING", "1 replica is pending"), INITIALIZING, pending=True)
    no_gpu = engine("a", phase="Pending", conditions=unschedulable("0/3 nodes: 3 Insufficient nvidia.com/gpu"))
    assert state_of(waiting, no_gpu).reason == "Unschedulable"
    assert "1 replica is pending" in state_of(waiting).message
    head = pod("generation", "head")
    head["status"]["containerStatuses"] = [
        {"name": "head", "ready": False, "restartCount": 2, **terminated(1, "no ray")}
    ]
    assert state_of(waiting, head).message == "container head: no ray"


def test_what_kuberay_refuses_fails_the_job() -> None:
    invalid = {"type": "Ready", "status": "False", "reason": "ValidationFailed", "message": "The RayService is invalid"}
    status = compute_status(compute_facts(ray_job(), raw(), observed(service({}, invalid)), support.SETTINGS, at(0)))
    failure = next(item for item in status["conditions"] if item["type"] == "FailureTarget")
    assert failure["reason"] == "Refused"
    assert "The RayService is invalid" in failure["message"]


def test_what_kuberay_gave_up_is_made_anew() -> None:
    late = {"type": "Ready", "status": "False", "reason": "InitializingTimeout", "message": "not ready within 1800s"}
    dead = service({}, late)
    decided = plan(compute_facts(ray_job(), raw(), observed(dead), support.SETTINGS, at(0)))
    assert [item.kind for item in decided.delete] == ["RayService"]
    assert "RayService" not in {item["kind"] for item in decided.apply}
    assert "timed out" in state_of(dead).message
    # Its finalizer holds it for a while.
    going = service({}, late, deletionTimestamp=support.stamp(1))
    decided = plan(compute_facts(ray_job(), raw(), observed(going), support.SETTINGS, at(1)))
    assert not decided.delete
    assert "RayService" not in {item["kind"] for item in decided.apply}
    checked = {"conditions": [condition("WorkersChecked", True, "Checked")]}
    decided = plan(compute_facts(ray_job(), raw(checked), observed(), support.SETTINGS, at(2)))
    assert "RayService" in {item["kind"] for item in decided.apply}
    # Not when the job's own deadline was first.
    begun = {"startTime": support.stamp(0), "conditions": [condition("GenerationReady", False, "Starting")]}
    status = compute_status(compute_facts(ray_job(), raw(begun), observed(dead), support.SETTINGS, at(1800)))
    failed = raw(status)
    decided = plan(compute_facts(ray_job(), failed, observed(dead), support.SETTINGS, at(1801)))
    assert decided.apply == ()
    assert [item.kind for item in decided.delete] == ["RayService"]


def test_it_is_gone_when_its_pods_are() -> None:
    assert not state_of(None, engine("a")).released
    assert state_of(None, engine("a", phase="Succeeded")).released
    assert state_of(None).released


def test_without_kuberay_its_jobs_are_refused() -> None:
    settings = support.SETTINGS.model_copy(update={"kuberay": False})
    status = compute_status(compute_facts(ray_job(), raw(), observed(), settings, at(0)))
    failure = next(item for item in status["conditions"] if item["type"] == "FailureTarget")
    assert "not installed" in failure["message"]


def test_replicas_that_ray_scales_are_those_it_has_pods_for() -> None:
    scaling = {"replicas": None, "autoscaling": {"minReplicas": 2, "maxReplicas": 8}}
    gpus = {"gpusPerReplica": 0.5, "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    found = state_of(service(application()), *(engine(name) for name in "abc"), **scaling, **gpus)
    assert (found.ready, found.desired) == (6, 6)
    found = state_of(
        service(application("RUNNING", "UPSCALING")), engine("a"), engine("b", ready=False), **scaling, **gpus
    )
    assert (found.ready, found.desired) == (2, 4)
    assert "from 2 to 8" in found.note


def build(**spec: Any) -> Object:
    made = context("KubeRay", **{"generation": {"backend": "KubeRay"}, **spec})
    return rayservice.build_rayservice(made, place(made.job.spec.generation, one_per_pod=False))


def test_weights_change_serves_configuration_and_nothing_of_the_cluster() -> None:
    one, other = build(), build(weights={"uri": "/models/7", "version": "7"})
    assert one["spec"]["rayClusterConfig"] == other["spec"]["rayClusterConfig"]
    assert {key for key in one["spec"] if one["spec"][key] != other["spec"][key]} == {"serveConfigV2"}
    assert one["metadata"] == other["metadata"]
    before, after = (json.loads(item["spec"]["serveConfigV2"]) for item in (one, other))
    [mine], [yours] = before["applications"], after["applications"]
    assert {key for key in mine if mine[key] != yours[key]} == {"deployments"}
    assert yours["deployments"] == [
        {"name": "Generation", "user_config": {"weights": {"uri": "/models/7", "version": "7"}}}
    ]


def test_what_runs_keeps_its_cluster_and_takes_its_weights() -> None:
    live = seal(build())
    # As KubeRay leaves it.
    group = live["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    group |= {"numOfHosts": 1, "priority": 0, "scaleStrategy": {}}
    image = {"backend": "KubeRay", "image": "example.org/new:1", "maxOngoingRequests": 7}
    wanted = build(generation=image, weights={"uri": "/models/7", "version": "7"}, startupDeadlineSeconds=60)
    kept = rayservice.keep_cluster(wanted, live)
    assert kept["spec"]["rayClusterConfig"] == live["spec"]["rayClusterConfig"]
    found = json.loads(kept["spec"]["serveConfigV2"])["applications"][0]
    assert found["args"]["max_ongoing_requests"] == 512
    assert found["deployments"][0]["user_config"]["weights"]["version"] == "7"
    assert kept["metadata"]["annotations"][rayservice.INITIALIZING_TIMEOUT] == "60s"
    assert rayservice.keep_cluster(wanted, seal(kept)) == kept
    assert rayservice.keep_cluster(wanted, None) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("case", RAY_CASES)
def test_serve_and_the_app_read_what_is_rendered(case: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    [made] = [item for item in children(case) if item["kind"] == "RayService"]
    assert len(made["metadata"]["name"]) <= 47
    config = ServeDeploySchema.model_validate(json.loads(made["spec"]["serveConfigV2"]))
    [application] = config.applications
    assert application.import_path == contract.IMPORT_PATH
    assert [item.name for item in application.deployments] == [contract.DEPLOYMENT]
    args = app.read_args(application.args)
    assert args.application == application.name
    # A change of it would start all engines anew.
    assert args.weights is None
    assert args.tokens_required
    options = app.deployment_options(args, gpus=app.replica_gpus(args, on_gpus=True))
    group = made["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    container = group["template"]["spec"]["containers"][0]
    limits = container.get("resources", {}).get("limits", {})
    bundles = options.get("placement_group_bundles") or [options["ray_actor_options"]]
    replicas = app.max_replicas(args)
    gpus = sum(item.get("GPU", item.get("num_gpus", 0)) for item in bundles)
    assert gpus * replicas <= group["maxReplicas"] * int(limits.get("nvidia.com/gpu", 0))
    cpus = sum(item.get("CPU", item.get("num_cpus", 0)) for item in bundles)
    assert cpus * replicas <= group["maxReplicas"] * int(group["rayStartParams"]["num-cpus"])


def test_an_engine_on_cpus_is_not_given_a_part_of_a_gpus_memory() -> None:
    [made] = [item for item in children("kuberay-cpu") if item["kind"] == "RayService"]
    [application] = json.loads(made["spec"]["serveConfigV2"])["applications"]
    args = app.read_args(application["args"])
    # vLLM refuses a part of 0.
    assert "gpu_memory_utilization" not in placed_engine_args(args)


def test_serve_is_set_up_as_on_one_machine(tmp_path: Any) -> None:
    for routing, balance in rayservice.BALANCE.items():
        there = serve_environment(routing, tmp_path, (1, 2, 3), haproxy=True)
        assert there["RAY_SERVE_HAPROXY_BALANCE_ALGORITHM"] == balance
        # Files and ports are a pod's own; proxies and workers elsewhere hear later of a replica that goes.
        for name in ("ENABLE_HA_PROXY", "HAPROXY_HARD_STOP_AFTER_S", "HAPROXY_METRICS_ENABLED"):
            assert rayservice.SERVE_ENVIRONMENT[f"RAY_SERVE_{name}"] == there[f"RAY_SERVE_{name}"]
    assert SESSION_HEADER in rayservice.BALANCE["Session"]


def test_the_cluster_is_rendered_for_the_ray_that_is_installed() -> None:
    import ray

    assert support.SETTINGS.ray_version.split(".")[:2] == ray.__version__.split(".")[:2]


def test_an_old_ray_has_no_tokens() -> None:
    made = context("KubeRay", generation={"backend": "KubeRay"})
    old = made.settings.model_copy(update={"ray_version": "2.9.1"})
    found = rayservice.build_rayservice(replace(made, settings=old), place(made.job.spec.generation, one_per_pod=False))
    assert "authOptions" not in found["spec"]["rayClusterConfig"]


def test_heads_do_not_know_the_engines_secrets() -> None:
    [made] = [item for item in children("kuberay-tp4") if item["kind"] == "RayService"]
    head = made["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    names_of = {item["name"] for item in head["containers"][0]["env"]}
    assert "RAY_SERVE_HAPROXY_MAXCONN" in names_of
    assert "HF_TOKEN" not in names_of
    assert "nodeSelector" not in head


@pytest.mark.parametrize("case", RAY_CASES)
def test_who_reaches_rays_ports(case: str) -> None:
    [policy] = [
        item
        for item in children(case)
        if item["kind"] == "NetworkPolicy" and item["metadata"]["name"].endswith("-generation")
    ]
    for rule in policy["spec"]["ingress"]:
        for port in rule.get("ports", ()):
            first, last = port["port"], port.get("endPort", port["port"])
            assert not any(first <= closed <= last for closed in (6379, 10001))
            if first <= names.RAY_DASHBOARD_PORT <= last:
                [who] = rule["from"]
                assert who["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "kuberay-operator"}
    [everything] = [rule for rule in policy["spec"]["ingress"] if "ports" not in rule]
    assert everything["from"] == [{"podSelector": policy["spec"]["podSelector"]}]


def test_the_services_are_there_before_the_cluster_and_leave_out_the_head() -> None:
    found = {item["metadata"]["name"]: item for item in children("kuberay-one-gpu") if item["kind"] == "Service"}
    assert found["one-gpu-generation"]["spec"]["selector"]["ray.io/serve"] == "true"
    [config] = [item for item in children("kuberay-one-gpu") if item["kind"] == "ConfigMap"]
    told = json.loads(config["data"]["job.json"])
    assert told["endpoint"] == "http://one-gpu-generation.research.svc:8000"
    assert told["discovery"] == "Endpoint"
