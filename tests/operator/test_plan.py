"""What is written and removed: by cases, and by a small cluster that does what clusters do."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kuberoll_api.contract import PodProgress
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.status import RolloutJobStatus
from kuberoll_operator import names
from kuberoll_operator.backends import backend_of
from kuberoll_operator.facts import compute_facts
from kuberoll_operator.model import Object, Observed, Plan, StatusPatch, indexes, is_true
from kuberoll_operator.plan import plan
from kuberoll_operator.status.job_status import compute_status, next_deadline
from kuberoll_operator.transitions import transitions
from tests.examples import examples
from tests.operator.support import (
    SETTINGS,
    at,
    check_job,
    child,
    condition,
    deployment,
    finish_job,
    job,
    job_condition,
    observed,
    pod,
    raw,
    stamp,
    terminated,
    workers_job,
)

READY = condition("GenerationReady", True, "Ready")
TARGET = condition("FailureTarget", True, "FailedShards")


def decide(facts: Observed, status: Mapping[str, Any] | None = None, seconds: float = 60, **spec: Any) -> Plan:
    return plan(compute_facts(job(**spec), raw(status), facts, SETTINGS, at(seconds)))


def applied(found: Plan) -> list[str]:
    names = [f"{item['kind']}/{item['metadata']['name'].removeprefix('puzzle-')}" for item in found.apply]
    # The digest of the tokens is another one in every job.
    return [re.sub(r"^(Secret/tokens)-[0-9a-f]{10}$", r"\1", name) for name in names]


def deleted(found: Plan) -> list[str]:
    return [f"{item.kind}/{item.name.removeprefix('puzzle-')}" for item in found.delete]


BUDGET = "PodDisruptionBudget/generation"

STANDING = [
    "Secret/tokens",
    "ConfigMap/config",
    "NetworkPolicy/workers",
    "NetworkPolicy/generation",
    "Service/generation",
    "Service/generation-pods",
    "Service/workers",
]


def shaped(live: Object, **spec: Any) -> Object:
    """A live Job with the shape that the job has."""
    suspend = bool(live["spec"].get("suspend"))
    [wanted] = [
        item
        for item in decide(observed(deployment(2)), **spec).apply
        if (item["kind"], item["metadata"]["name"]) == ("Job", live["metadata"]["name"])
    ]
    annotations = {names.SHAPE_DIGEST: wanted["metadata"]["annotations"][names.SHAPE_DIGEST]}
    return {
        **live,
        "metadata": {**live["metadata"], "annotations": annotations},
        "spec": {**wanted["spec"], "suspend": suspend},
    }


CHECKED = condition("WorkersChecked", True, "Checked")
UNCHECKED = condition("WorkersChecked", False, "Checking")


def test_no_engine_is_asked_for_before_the_check_is_done() -> None:
    assert applied(decide(observed())) == [*STANDING, "Job/check"]
    status = {"conditions": [UNCHECKED]}
    assert applied(decide(observed(check_job(active=1)), status)) == [*STANDING, "Job/check"]
    done = decide(observed(check_job(conditions=job_condition("Complete"))), status)
    # What its pod said is written down first.
    assert (applied(done), deleted(done)) == ([*STANDING, BUDGET, "Deployment/generation"], [])
    recorded = decide(observed(check_job(conditions=job_condition("Complete"))), {"conditions": [CHECKED]})
    assert (applied(recorded), deleted(recorded)) == ([*STANDING, BUDGET, "Deployment/generation"], ["Job/check"])


def revisions(found: Plan) -> set[str | None]:
    """The model's revisions in the configurations of pods."""
    [config] = [item for item in found.apply if item["kind"] == "ConfigMap"]
    return {json.loads(text)["job"]["spec"]["generation"]["model"].get("revision") for text in config["data"].values()}


def test_replicas_load_the_commit_that_the_check_found() -> None:
    """Also those that start after a push to the model's branch."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    said = terminated(0, json.dumps({"planned": 8, "commit": commit, "done": True, "cause": ""}))
    facts = observed(
        check_job(conditions=job_condition("Complete")), pods=[pod("check", phase="Succeeded", container=said)]
    )
    stale = {"generation": {"modelCommit": "f" * 40}}
    assert revisions(decide(facts, {"conditions": [UNCHECKED], **stale})) == {commit}
    recorded = {"conditions": [CHECKED], "generation": {"modelCommit": commit}}
    assert revisions(decide(observed(), recorded)) == {commit}
    ray = decide(observed(), recorded, generation={"backend": "KubeRay"})
    [service] = [item for item in ray.apply if item["kind"] == "RayService"]
    assert f'"revision":"{commit}"' in service["spec"]["serveConfigV2"].replace(" ", "")
    # Before it has ended, what an earlier one found is nothing: the spec may be another one.
    assert revisions(decide(observed(check_job(active=1)), {"conditions": [UNCHECKED], **stale})) == {None}
    # Workers of an older release say none, and nobody's word is taken for one.
    for older in ({"planned": 8, "done": True}, {"planned": 8, "commit": "main; rm -rf", "done": True}):
        pods = [pod("check", phase="Succeeded", container=terminated(0, json.dumps(older)))]
        facts = observed(check_job(conditions=job_condition("Complete")), pods=pods)
        assert revisions(decide(facts, {"conditions": [UNCHECKED]})) == {None}


def test_a_failed_check_asks_for_no_engine() -> None:
    failed = check_job(conditions=job_condition("Failed", "PodFailurePolicy"))
    pods = [pod("check", phase="Failed", container=terminated(78, "there is no environment type sliding_puzle"))]
    facts = observed(failed, pods=pods)
    assert decide(facts, {"conditions": [UNCHECKED]}) == Plan()
    cause = compute_facts(job(), raw({"conditions": [UNCHECKED]}), facts, SETTINGS, at(0)).failure
    assert cause == ("Refused", "there is no environment type sliding_puzle")
    # Its pod stays, with its log.
    assert decide(facts, {"conditions": [TARGET]}) == Plan()


def test_a_resumed_job_is_checked_again() -> None:
    suspended = decide(observed(check_job()), {"conditions": [UNCHECKED]}, suspend=True)
    assert deleted(suspended) == ["Job/check"]
    live = shaped(workers_job(suspend=True))
    resumed = decide(observed(live), {"conditions": [condition("WorkersChecked", False, "JobSuspended")]})
    assert applied(resumed) == [*STANDING, "Job/check", "Job/workers"]
    assert resumed.apply[-1]["spec"]["suspend"] is True


def test_a_job_of_an_older_operator_goes_on_unchecked() -> None:
    assert applied(decide(observed(deployment(1)))) == [*STANDING, BUDGET, "Deployment/generation"]


def test_somebody_elses_engine_needs_no_check() -> None:
    external: dict[str, Any] = {
        "generation": {"backend": "External", "external": {"url": "http://policy:1/"}, "replicas": None}
    }
    assert "Job/check" not in applied(decide(observed(), **external))


@pytest.mark.parametrize(
    ("scale", "kept"),
    [
        ({"replicas": 2}, True),
        ({"replicas": 1}, False),
        ({"replicas": None, "autoscaling": {"maxReplicas": 2}}, True),
        ({"replicas": None, "autoscaling": {"maxReplicas": 1}}, False),
    ],
    ids=str,
)
def test_a_drain_takes_one_engine_of_several_at_a_time(scale: dict[str, Any], kept: bool) -> None:
    budget = child("PodDisruptionBudget", "puzzle-generation")
    found = decide(observed(deployment(2), budget), generation=scale)
    assert (BUDGET in applied(found), BUDGET in deleted(found)) == (kept, not kept)
    assert BUDGET not in deleted(decide(observed(deployment(2)), generation=scale))
    for item in found.apply:
        if item["kind"] == "PodDisruptionBudget":
            [engines] = [other for other in found.apply if other["kind"] == "Deployment"]
            assert item["spec"]["selector"] == engines["spec"]["selector"]
            assert item["spec"]["maxUnavailable"] == 1
            assert item["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    # It goes with the engines, and holds up nothing.
    assert deleted(decide(observed(deployment(2), budget), suspend=True)) == ["Deployment/generation", BUDGET]
    assert is_true(
        compute_status(compute_facts(job(suspend=True), raw(), observed(budget), SETTINGS, at(0))), "Suspended"
    )


def test_engines_are_scaled_while_they_run() -> None:
    live = child("Deployment", "puzzle-generation", status={"observedGeneration": 1, "readyReplicas": 2})
    live["spec"] = decide(observed(), {"conditions": [CHECKED]}).apply[-1]["spec"]
    live["metadata"]["annotations"] = {names.SHAPE_DIGEST: "of an older operator"}
    for replicas in (1, 3):
        scaled: dict[str, Any] = {"generation": {"replicas": replicas}}
        [wanted] = [item for item in decide(observed(live), **scaled).apply if item["kind"] == "Deployment"]
        assert wanted["spec"] == {**live["spec"], "replicas": replicas}
    ready = {"conditions": [CHECKED, condition("GenerationReady", True, "Ready")]}
    status = compute_status(compute_facts(job(**scaled), raw(ready), observed(live), SETTINGS, at(60)))
    [found] = [item for item in status["conditions"] if item["type"] == "GenerationReady"]
    assert (found["status"], found["message"]) == ("True", "2 of 3 replicas are ready")
    assert status["generation"] == {**status["generation"], "readyReplicas": 2, "desiredReplicas": 3}


def test_groups_are_scaled_while_they_run() -> None:
    live = decide(observed(), {"conditions": [CHECKED]}, **SPREAD).apply[-1]
    live["metadata"] |= {"uid": "1", "annotations": {names.SHAPE_DIGEST: "of an older operator"}}
    scaled: dict[str, Any] = {"generation": {**SPREAD["generation"], "replicas": 3}}
    [wanted] = [item for item in decide(observed(live), **scaled).apply if item["kind"] == "LeaderWorkerSet"]
    assert wanted["spec"] == {**live["spec"], "replicas": 3}


def test_the_number_of_engines_is_nothing_to_pods() -> None:
    """Their configuration stays as it is, and so does what a run is compared by."""
    made = [decide(observed(), generation=scale).apply for scale in ({"replicas": 1}, {"replicas": 3})]
    made.append(decide(observed(), generation={"replicas": None, "autoscaling": {"maxReplicas": 4}}).apply)
    configs = [next(item["data"] for item in found if item["kind"] == "ConfigMap") for found in made]
    assert configs[0] == configs[1] == configs[2]


SPREAD: dict[str, Any] = {
    "generation": {
        "engineArgs": {"tensor_parallel_size": 8, "pipeline_parallel_size": 2},
        "resources": {"limits": {"nvidia.com/gpu": "8"}},
    }
}


def test_replicas_that_span_pods_are_groups() -> None:
    found = decide(observed(), {"conditions": [CHECKED]}, **SPREAD)
    assert applied(found)[-1] == "LeaderWorkerSet/replicas"
    assert found.apply[-1]["spec"]["replicas"] == 2
    assert found.apply[-1]["spec"]["leaderWorkerTemplate"]["size"] == 2
    for service in [
        item
        for item in found.apply
        if item["kind"] == "Service" and item["metadata"]["name"].startswith("puzzle-generation")
    ]:
        assert service["spec"]["selector"][names.WORKER_INDEX_LABEL] == "0"
    # As many as have all their pods.
    groups = child("LeaderWorkerSet", "puzzle-replicas", status={"observedGeneration": 1, "readyReplicas": 1})
    starting = compute_status(
        compute_facts(job(**SPREAD), raw({"conditions": [CHECKED]}), observed(groups), SETTINGS, at(60))
    )
    assert starting["generation"]["readyReplicas"] == 1
    groups["status"]["readyReplicas"] = 2
    assert "Job/workers" in applied(decide(observed(groups), {"conditions": [CHECKED]}, **SPREAD))
    assert deleted(decide(observed(groups), suspend=True, **SPREAD)) == ["LeaderWorkerSet/replicas"]


def test_without_groups_a_replica_is_within_a_pod() -> None:
    unserved = SETTINGS.model_copy(update={"leader_worker_set": False})
    assert plan(compute_facts(job(**SPREAD), raw(), observed(), unserved, at(0))) == Plan()
    status = compute_status(compute_facts(job(**SPREAD), raw(), observed(), unserved, at(0)))
    assert "install LeaderWorkerSet" in str(status["conditions"])


def test_workers_come_when_generation_is_ready() -> None:
    found = decide(observed(deployment(2)))
    assert applied(found) == [*STANDING, BUDGET, "Deployment/generation", "Job/workers"]
    assert found.apply[-1]["spec"]["suspend"] is False


def test_nothing_runs_in_a_suspended_job() -> None:
    assert applied(decide(observed(), suspend=True)) == STANDING
    live = shaped(workers_job(active=2))
    found = decide(observed(deployment(2), live), suspend=True)
    assert applied(found) == [*STANDING, "Job/workers"]
    assert found.apply[-1]["spec"]["suspend"] is True
    assert deleted(found) == ["Deployment/generation"]


def test_a_resumed_job_waits_for_its_generation() -> None:
    live = shaped(workers_job(suspend=True))
    assert decide(observed(live)).apply[-1]["spec"]["suspend"] is True
    assert decide(observed(live, deployment(2))).apply[-1]["spec"]["suspend"] is False


def test_workers_go_on_while_an_engine_restarts() -> None:
    live = shaped(workers_job(active=2))
    found = decide(observed(live, deployment(0)))
    assert found.apply[-1]["spec"]["suspend"] is False
    assert "Deployment/generation" in applied(found)


def test_a_suspended_job_with_another_template_is_made_anew() -> None:
    live = shaped(workers_job(suspend=True))
    change: dict[str, Any] = {"workers": {"image": "example.org/new:1"}, "suspend": True}
    found = decide(observed(live), **change)
    assert (applied(found), deleted(found)) == (STANDING, ["Job/workers"])
    # Two pods of one shard would write to the same place.
    waiting = decide(observed(live, pods=[pod("workers", shard=0)]), **change)
    assert (applied(waiting), deleted(waiting)) == (STANDING, [])
    assert "Job/workers" not in applied(decide(observed(deployment(2), pods=[pod("workers", shard=0)])))


def test_the_number_of_shards_is_settled_once() -> None:
    for facts, status in (
        (observed(deployment(2), shaped(workers_job())), None),
        (observed(deployment(2)), {"workers": {"shards": 4}}),
    ):
        [made] = [
            item for item in decide(facts, status, workers={"shards": 9, "replicas": 9}).apply if item["kind"] == "Job"
        ]
        assert made["spec"]["completions"] == 4
        assert made["spec"]["parallelism"] == 4


def test_gpus_go_back_when_the_last_shard_is_done() -> None:
    for facts in (workers_job(succeeded=4), workers_job(conditions=job_condition("Complete"))):
        found = decide(observed(deployment(2), facts))
        assert "Job/finish" in applied(found)
        assert "Deployment/generation" not in applied(found)
        assert deleted(found) == ["Deployment/generation"]


def test_done_shards_are_not_run_again_when_their_job_is_gone() -> None:
    status = {"conditions": [READY, condition("WorkersReady", False, "ShardsDone")]}
    found = decide(observed(deployment(2)), status)
    assert "Job/finish" in applied(found)
    assert "Job/workers" not in applied(found)


def test_a_failure_is_written_down_before_its_traces_are_removed() -> None:
    failed = workers_job(conditions=job_condition("Failed", "FailedIndexes"), failedIndexes="1")
    assert decide(observed(deployment(2), failed)) == Plan()
    found = decide(observed(deployment(2), failed), {"conditions": [TARGET]})
    # The workers' Job stays, with its pods and their logs.
    assert (applied(found), deleted(found)) == ([], ["Deployment/generation"])


def test_a_job_that_fails_while_workers_run_suspends_them() -> None:
    live = shaped(workers_job(active=2))
    found = decide(observed(deployment(2), live), {"conditions": [TARGET]})
    assert (applied(found), deleted(found)) == (["Job/workers"], ["Deployment/generation"])
    assert found.apply[0]["spec"]["suspend"] is True
    at_rest = {**live, "spec": {**live["spec"], "suspend": True}}
    assert applied(decide(observed(at_rest), {"conditions": [TARGET]})) == []


def test_workers_that_cannot_be_rendered_any_more_are_removed() -> None:
    found = decide(observed(workers_job(active=2)), {"conditions": [TARGET]}, output={"uri": "relative/path"})
    assert (applied(found), deleted(found)) == ([], ["Job/workers"])


def test_the_finish_job_that_failed_stays_with_its_logs() -> None:
    status = {"conditions": [condition("FailureTarget", True, "FinishFailed")]}
    facts = observed(workers_job(conditions=job_condition("Complete")), finish_job(conditions=job_condition("Failed")))
    assert decide(facts, status) == Plan()
    under_way = decide(observed(finish_job()), {"conditions": [TARGET]})
    assert applied(under_way) == ["Job/finish"]
    assert under_way.apply[0]["spec"]["suspend"] is True


@pytest.mark.parametrize("end", ["Complete", "Failed"])
def test_terminal_is_terminal(end: str) -> None:
    status = {"conditions": [condition(end, True, "X", seconds=10)]}
    facts = observed(deployment(2), workers_job(active=4))
    assert decide(facts, status, 1e9) == Plan()
    assert decide(facts, status, 109, ttlSecondsAfterFinished=100) == Plan()
    assert decide(facts, status, 110, ttlSecondsAfterFinished=100) == Plan(delete_job=True)
    assert decide(facts, status, 10, ttlSecondsAfterFinished=0, suspend=True) == Plan(delete_job=True)


def test_somebody_elses_jobs_are_left_alone() -> None:
    assert decide(observed(deployment(2)), managedBy="kueue.x-k8s.io/multikueue") == Plan()
    assert applied(decide(observed(), managedBy="kuberoll.io/operator"))
    assert (
        plan(compute_facts(job(), raw(deletionTimestamp=stamp(0)), observed(deployment(2)), SETTINGS, at(0))) == Plan()
    )


@pytest.mark.parametrize("kind", ["stranger", "earlier"])
def test_what_is_not_ours_is_neither_written_nor_removed(kind: str) -> None:
    other = child("Deployment", "puzzle-generation", uid="other")
    if kind == "stranger":
        other["metadata"] = {"name": "puzzle-generation", "labels": {"app": "somebody's"}}
    for status, spec in ((None, {}), (None, {"suspend": True}), ({"conditions": [TARGET]}, {})):
        assert decide(observed(other), status, **spec) == Plan()


def test_a_job_that_cannot_run_writes_nothing() -> None:
    assert decide(observed(), output={"uri": "runs/x"}) == Plan()
    assert decide(observed(), output={"uri": "runs/x"}, suspend=True) == Plan()
    two = {"limits": {"nvidia.com/gpu": 2}}
    assert (
        decide(
            observed(), generation={"backend": "KubeRay", "engineArgs": {"tensor_parallel_size": 3}, "resources": two}
        )
        == Plan()
    )


def test_an_external_endpoint_needs_no_engine() -> None:
    spec: dict[str, Any] = {
        "generation": {"backend": "External", "external": {"url": "http://policy:1"}, "replicas": None}
    }
    found = decide(observed(), **spec)
    assert applied(found) == ["ConfigMap/config", "NetworkPolicy/workers", "Service/workers", "Job/workers"]
    assert "http://policy:1" in found.apply[0]["data"]["job.json"]


@pytest.mark.parametrize(
    ("backend", "status", "kuberay", "expected"),
    [
        ("Auto", {}, False, "Native"),
        ("Auto", {"generation": {"backend": "Native"}}, True, "Native"),
        ("Auto", {"generation": {"backend": "External"}}, False, "Native"),
        ("Native", {"generation": {"backend": "External"}}, True, "Native"),
        ("Auto", {}, None, "Native"),
        ("Auto", {"generation": {"backend": "KubeRay"}}, False, "KubeRay"),
        ("KubeRay", {}, False, "KubeRay"),
    ],
)
def test_the_backend_is_settled_once(backend: str, status: Any, kuberay: bool | None, expected: str) -> None:
    assert backend_of(job(generation={"backend": backend}), status, kuberay=kuberay) == expected


def test_indexes() -> None:
    assert indexes("") == []
    assert indexes("1,3-5,9") == [1, 3, 4, 5, 9]


class Cluster(RuleBasedStateMachine):
    """A cluster with one job: controllers and pods do what they may at any moment, and the operator reconciles."""

    SETTINGS = SETTINGS
    SHARDS = 3
    PLANNED = 4

    def __init__(self) -> None:
        super().__init__()
        self.spec: dict[str, Any] = {
            "workers": {"replicas": 2, "shards": self.SHARDS, "maxFailedShards": 1},
            "startupDeadlineSeconds": 600,
            "activeDeadlineSeconds": 3000,
            "ttlSecondsAfterFinished": 500,
            "rollout": {"maxFailedFraction": 1.0},
        }
        self.status: dict[str, Any] = {}
        self.children: dict[tuple[str, str], Object] = {}
        self.pods: dict[str, Object] = {}
        self.done: set[int] = set()
        self.given_up: set[int] = set()
        self.seconds = 0
        self.made = 0
        self.deleted = False
        self.was_ready = self.checked = False
        self.attentive = True
        self.over: dict[str, Any] | None = None

    # The operator.

    @property
    def now(self) -> datetime:
        return at(self.seconds)

    def job(self) -> RolloutJob:
        return job(**self.spec)

    def observe(self) -> Observed:
        progress = {
            int(item["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]): item["played"]
            for item in self.pods.values()
            if "played" in item and item["status"]["phase"] == "Running"
        }
        told = {
            shard: PodProgress(shard=shard, trajectories=count, planned=self.PLANNED)
            for shard, count in progress.items()
        }
        return copy.deepcopy(Observed(children=self.children, pods=list(self.pods.values()), progress=told))

    def look(self) -> tuple[Plan, dict[str, Any]]:
        seen = self.observe()
        live = raw(self.status or None)
        return (
            plan(compute_facts(self.job(), live, seen, self.SETTINGS, self.now)),
            compute_status(compute_facts(self.job(), live, seen, self.SETTINGS, self.now)),
        )

    @precondition(lambda self: not self.deleted)
    @rule()
    def reconcile(self) -> None:
        decided, status = self.look()
        for item in decided.apply:
            self.apply(item)
        for change in decided.patch:
            self.patch(change)
        for ref in decided.delete:
            self.delete(ref.kind, ref.name)
        if decided.delete_job:
            self.deleted = True
        # Events come with news, and news is written.
        assert not transitions(self.status, self.status)
        RolloutJobStatus.model_validate(status)
        if self.over is not None:
            assert status == self.over
        kinds = [item["type"] for item in self.status.get("conditions", [])]
        assert set(kinds) <= {item["type"] for item in status["conditions"]}
        if is_true(status, "Complete"):
            # GPUs and workers are gone before it is said.
            assert not self.living("generation")
            assert not self.living("workers")
            assert ("Deployment", "puzzle-generation") not in self.children
            assert len(self.done) + len(self.given_up) == self.SHARDS
        if is_true(status, "Failed"):
            assert not self.living("generation")
            assert not self.living("workers")
        if is_true(status, "Complete") or is_true(status, "Failed"):
            assert not (is_true(status, "Complete") and is_true(status, "Failed"))
            self.over = status
        wait = next_deadline(self.job(), status, self.now)
        assert wait is None or wait >= 0
        self.status = status

    @rule()
    def settle(self) -> None:
        """Of the same facts nothing more is written, after a few steps of which each follows from the one before."""
        for _ in range(4):
            before = self.written()
            if not self.deleted:
                self.reconcile()
            if self.written() == before:
                return
        raise AssertionError("it goes on writing")

    def written(self) -> str:
        return json.dumps([self.status, [[*key, value] for key, value in sorted(self.children.items())]])

    def apply(self, item: Object) -> None:
        key = item["kind"], item["metadata"]["name"]
        live = self.children.get(key)
        if item["kind"] == "Job" and "workers" in key[1]:
            if not item["spec"]["suspend"] and (live is None or live["spec"]["suspend"]):
                # Never workers before generation is ready.
                assert self.was_ready
            if live is None:
                assert not self.living("workers")
                self.done, self.given_up = set(), set()
            else:
                assert live["spec"]["template"] == item["spec"]["template"]
                assert live["spec"]["completions"] == item["spec"]["completions"]
        if item["kind"] == "Deployment":
            # Never an engine before it is known that workers will find what they need, and none that is started anew.
            assert self.checked if live is None else live["spec"]["template"] == item["spec"]["template"]
            assert item["spec"]["replicas"] == self.engines()
        made = copy.deepcopy(item)
        made["metadata"]["generation"] = 1
        made["status"] = copy.deepcopy(live["status"]) if live else {}
        self.children[key] = made

    def patch(self, change: StatusPatch) -> None:
        live = self.children[change.ref.kind, change.ref.name]
        changed = {**live["status"], **change.status}
        live["status"] = {key: value for key, value in changed.items() if value is not None}

    def delete(self, kind: str, name: str) -> None:
        del self.children[kind, name]
        if name == "puzzle-check":
            self.checked = self.checked and not self.spec.get("suspend")
        component = name.removeprefix("puzzle-")
        for item in self.pods.values():
            if item["metadata"]["labels"][names.COMPONENT_LABEL] == component:
                item["dying"] = True

    # The cluster.

    def living(self, component: str) -> list[str]:
        return [
            name
            for name, item in sorted(self.pods.items())
            if item["metadata"]["labels"][names.COMPONENT_LABEL] == component
            and item["status"]["phase"] not in {"Succeeded", "Failed"}
        ]

    def start(self, component: str, shard: int | None = None) -> None:
        self.made += 1
        made = pod(component, str(self.made), shard=shard)
        self.pods[made["metadata"]["name"]] = {**made, "played": 0} if component == "workers" else made

    @rule(seconds=st.sampled_from([1, 20, 200]))
    def time_passes(self, seconds: int) -> None:
        self.seconds += seconds

    @rule()
    def suspend_toggles(self) -> None:
        self.spec["suspend"] = not self.spec.get("suspend", False)

    @rule(replicas=st.integers(0, 4))
    def is_scaled(self, replicas: int) -> None:
        self.spec["workers"] = {**self.spec["workers"], "replicas": replicas}

    @rule(replicas=st.sampled_from([None, 1, 2, 3]))
    def engines_are_scaled(self, replicas: int | None) -> None:
        self.spec["generation"] = {"replicas": replicas}

    def engines(self) -> int:
        """Number of engines that there should be."""
        return self.spec.get("generation", {"replicas": 2})["replicas"] or 1

    @rule()
    def template_is_edited(self) -> None:
        """As a user does it: suspend, edit, resume."""
        self.spec["suspend"] = True
        self.reconcile_unless_deleted()
        self.made += 1
        self.spec["workers"] = {**self.spec["workers"], "image": f"example.org/worker:{self.made}"}
        self.reconcile_unless_deleted()
        self.spec["suspend"] = False

    def reconcile_unless_deleted(self) -> None:
        if not self.deleted:
            self.reconcile()

    @rule()
    def generation_becomes_ready(self) -> None:
        live = self.children.get(("Deployment", "puzzle-generation"))
        if live is not None:
            for _ in range(live["spec"]["replicas"] - len(self.living("generation"))):
                self.start("generation")
            live["status"] = {"observedGeneration": 1, "readyReplicas": live["spec"]["replicas"]}

    @rule(ready=st.integers(0, 1))
    def engines_are_lost(self, ready: int) -> None:
        live = self.children.get(("Deployment", "puzzle-generation"))
        if live is not None:
            live["status"] = {"observedGeneration": 1, "readyReplicas": ready}

    @rule()
    def workers_start(self) -> None:
        live = self.children.get(("Job", "puzzle-workers"))
        # A Job that has failed or is complete starts no pod.
        if live is None or live["spec"]["suspend"] or live["status"].get("conditions"):
            return
        running = {
            item["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]
            for item in (self.pods[name] for name in self.living("workers"))
        }
        for shard in range(self.SHARDS):
            if len(self.living("workers")) >= live["spec"]["parallelism"]:
                break
            if shard not in self.done | self.given_up and str(shard) not in running:
                self.start("workers", shard)

    @rule(data=st.data(), count=st.integers(0, PLANNED))
    def worker_plays(self, data: st.DataObject, count: int) -> None:
        if living := self.living("workers"):
            item = self.pods[data.draw(st.sampled_from(living))]
            item["played"] = max(item["played"], count)

    @rule(data=st.data(), code=st.sampled_from([0, 0, 0, 1, 75, 78]), last=st.booleans())
    def worker_ends(self, data: st.DataObject, code: int, last: bool) -> None:
        if not (living := self.living("workers")):
            return
        item = self.pods[data.draw(st.sampled_from(living))]
        shard = int(item["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"])
        played = self.PLANNED if code == 0 else item["played"]
        message = json.dumps({"shard": shard, "trajectories": played, "planned": self.PLANNED, "cause": "it ended"})
        item["status"]["phase"] = "Failed" if code else "Succeeded"
        ended = terminated(code, message, seconds=self.seconds)
        item["status"]["containerStatuses"] = [{"name": "worker", **ended}]
        live = self.children.get(("Job", "puzzle-workers"))
        if live is None or item.get("dying"):
            return
        if code == 0:
            self.done.add(shard)
        if code == 1 and last:
            self.given_up.add(shard)
        status = live["status"]
        status |= {"succeeded": len(self.done), "failedIndexes": ",".join(map(str, sorted(self.given_up)))}
        if status.get("conditions"):
            return
        if code == 78:
            status["conditions"] = job_condition("Failed", "PodFailurePolicy", "exit code 78")
        elif len(self.given_up) > live["spec"]["maxFailedIndexes"]:
            status["conditions"] = job_condition("Failed", "MaxFailedIndexesExceeded", "too many")
        elif len(self.done) == self.SHARDS:
            status["conditions"] = job_condition("Complete")
        elif len(self.done) + len(self.given_up) == self.SHARDS:
            status["conditions"] = job_condition("Failed", "FailedIndexes", "some failed")

    @rule(code=st.sampled_from([0, 0, 0, 1, 78]))
    def check_ends(self, code: int) -> None:
        live = self.children.get(("Job", "puzzle-check"))
        if live is None or live["spec"]["suspend"] or live["status"]:
            return
        self.start("check")
        item = self.pods[f"puzzle-check-{self.made}"]
        ended = terminated(code, json.dumps({"planned": self.PLANNED * self.SHARDS, "cause": "it ended"}))
        item["status"] = {
            "phase": "Failed" if code else "Succeeded",
            "containerStatuses": [{"name": "worker", **ended}],
        }
        reason = {1: "BackoffLimitExceeded", 78: "PodFailurePolicy"}.get(code, "")
        live["status"] = {"conditions": job_condition("Failed" if code else "Complete", reason)}
        self.checked = code == 0

    @rule()
    def finish_ends(self) -> None:
        live = self.children.get(("Job", "puzzle-finish"))
        if live is not None and not live["spec"]["suspend"] and not live["status"]:
            self.start("finish")
            item = self.pods[f"puzzle-finish-{self.made}"]
            item["status"] = {
                "phase": "Succeeded",
                "containerStatuses": [
                    {"name": "finish", **terminated(0, '{"trajectories": 12, "failed": 0, "planned": 12}')}
                ],
            }
            live["status"] = {"conditions": job_condition("Complete")}

    @rule(data=st.data())
    def dying_pods_vanish(self, data: st.DataObject) -> None:
        suspended = self.children.get(("Job", "puzzle-workers"), {}).get("spec", {}).get("suspend")
        dying = [
            name
            for name, item in sorted(self.pods.items())
            if item.get("dying") or (suspended and name in self.living("workers"))
        ]
        if dying:
            del self.pods[data.draw(st.sampled_from(dying))]

    @rule()
    def finished_job_is_removed_by_somebody(self) -> None:
        if self.status and condition_reason(self.status, "WorkersReady") == "ShardsDone":
            self.children.pop(("Job", "puzzle-workers"), None)

    @invariant()
    def operator_reacts(self) -> None:
        """As a rule at once; while it is away, the world goes on."""
        self.remember_readiness()
        if self.attentive and not self.deleted:
            self.reconcile()

    def remember_readiness(self) -> None:
        live = self.children.get(("Deployment", "puzzle-generation"))
        ready = live is not None and live["status"].get("readyReplicas", 0) >= self.engines()
        self.was_ready = ready or (self.was_ready and live is not None)

    @rule()
    def operator_goes_and_comes(self) -> None:
        self.attentive = not self.attentive

    @initialize(begun=st.booleans())
    def may_have_begun(self, begun: bool) -> None:
        if begun:
            self.reconcile()
            type(self).check_ends(self, 0)
            self.reconcile()
            self.generation_becomes_ready()
            self.remember_readiness()
            self.reconcile()
            self.workers_start()

    def teardown(self) -> None:
        """Left alone with working pods, every job comes to its end, and then is silent and removed."""
        self.spec["suspend"] = False
        self.spec["workers"] = {**self.spec["workers"], "replicas": 2}
        for turn in range(200):
            if self.deleted:
                break
            self.reconcile()
            type(self).check_ends(self, 0)
            self.generation_becomes_ready()
            self.remember_readiness()
            self.workers_start()
            for name in self.living("workers"):
                self.end_well(name)
            self.finish_ends()
            for name in [name for name, item in self.pods.items() if item.get("dying") and turn % 3 == 0]:
                del self.pods[name]
            self.seconds += 20
        assert self.deleted

    def end_well(self, name: str) -> None:
        class One:
            def draw(self, strategy: object) -> str:
                return name

        type(self).worker_ends(self, One(), 0, False)


def condition_reason(status: Mapping[str, Any], kind: str) -> str | None:
    return next((item["reason"] for item in status.get("conditions", ()) if item["type"] == kind), None)


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=examples(60), stateful_step_count=examples(40), deadline=None)
