"""Jobs in a queue of Kueue's: what is asked for, what follows from an admission, an eviction and the end."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from kuberoll_api import conditions
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_operator import names
from kuberoll_operator.facts import compute_facts
from kuberoll_operator.model import ClusterQuota, Object, Observed, Plan, StatusPatch, condition, is_true
from kuberoll_operator.plan import plan
from kuberoll_operator.status.job_status import compute_status
from kuberoll_operator.transitions import transitions
from tests.examples import examples
from tests.operator import support
from tests.operator.support import at, child, deployment, finish_job, observed, pod, raw, workers_job
from tests.operator.test_plan import BUDGET, STANDING, Cluster, applied, deleted

SETTINGS = support.SETTINGS.model_copy(update={"kueue": True})
LABELS = {names.QUEUE_LABEL: "team"}
FLAVOR = {"nodeLabels": {"pool": "a100"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}


def job(labels: Mapping[str, str] = LABELS, **spec: Any) -> RolloutJob:
    item = support.manifest(**spec)
    item["metadata"]["labels"] = dict(labels)
    return RolloutJob.model_validate(item)


def workload(*held: str, reasons: Mapping[str, str] | None = None, queue: str = "team", **status: Any) -> Object:
    """The job's Workload; `held`: conditions that are True."""
    found = [
        {"type": kind, "status": "True", "reason": (reasons or {}).get(kind, kind), "message": f"{kind} it is"}
        for kind in held
    ]
    sets = [{"name": "generation", "count": 2}, {"name": "workers", "count": 2}]
    assignments = [{**item, "flavors": {"cpu": "spot"}} for item in sets]
    admission = {"clusterQueue": "cluster", "podSetAssignments": assignments}
    given = {"admission": admission} if "QuotaReserved" in held else {}
    return child(
        "Workload",
        "puzzle-workload",
        spec={"queueName": queue, "podSets": sets},
        status={"conditions": found, **given, **status},
        resourceVersion="7",
    )


ADMITTED = workload("QuotaReserved", "Admitted")
EVICTED = workload("QuotaReserved", "Admitted", "Evicted", reasons={"Evicted": "Preempted"})


CHECKED = support.condition("WorkersChecked", True, "Checked")


def checked(status: Mapping[str, Any] | None) -> Object:
    """The job as it is, of which it is known that its workers will have what they need."""
    found = {item["type"]: item for item in (CHECKED, *(status or {}).get("conditions", ()))}
    return raw({**(status or {}), "conditions": list(found.values())})


def decide(facts: Observed, status: Mapping[str, Any] | None = None, labels: Any = LABELS, **spec: Any) -> Plan:
    return plan(compute_facts(job(labels, **spec), checked(status), facts, SETTINGS, at(60)))


def told(facts: Observed, status: Mapping[str, Any] | None = None, labels: Any = LABELS, **spec: Any) -> dict[str, Any]:
    return compute_status(compute_facts(job(labels, **spec), checked(status), facts, SETTINGS, at(60)))


def reason(status: Mapping[str, Any], kind: str = conditions.SUSPENDED) -> tuple[str, str]:
    found = condition(status, kind)
    return found["status"], found["reason"]


def patches(found: Plan) -> list[Mapping[str, Any]]:
    assert all((item.ref.name, item.version) == ("puzzle-workload", "7") for item in found.patch)
    return [item.status for item in found.patch]


def kinds(patch: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    return {item["type"]: (item["status"], item["reason"]) for item in patch["conditions"]}


def test_a_job_in_a_queue_asks_for_its_quota_and_for_no_pod() -> None:
    found = decide(observed())
    assert applied(found) == [*STANDING, "Workload/workload"]
    asked = found.apply[-1]["spec"]
    assert asked["queueName"] == "team"
    assert {item["name"]: item["count"] for item in asked["podSets"]} == {"generation": 2, "workers": 2}
    status = told(observed())
    assert (status["phase"], reason(status)) == ("Queued", ("True", "Queued"))
    assert "startTime" not in status
    assert reason(status, conditions.WORKERS_READY) == ("False", "Queued")
    assert [event.reason for event in transitions({}, status)][:1] == ["Queued"]


def test_kueue_says_what_is_waited_for() -> None:
    reserved = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": "2 more gpus are needed"}
    status = told(observed(workload(conditions=[reserved])))
    assert condition(status, "Suspended")["message"] == "waiting for quota in queue team: 2 more gpus are needed"
    checks = [{"name": "provisioning", "state": "Pending", "message": "nodes are booked"}]
    status = told(observed(workload("QuotaReserved", admissionChecks=checks)))
    assert "waiting for admission checks: provisioning is Pending: nodes are booked" in str(status["conditions"])
    dormant = workload()
    dormant["spec"]["active"] = False
    assert "deactivated" in condition(told(observed(dormant)), "Suspended")["message"]


def test_without_kueue_a_queue_is_waited_for_and_not_gone_round() -> None:
    unserved = SETTINGS.model_copy(update={"kueue": False})
    assert applied(plan(compute_facts(job(), raw(), observed(), unserved, at(0)))) == STANDING
    status = compute_status(compute_facts(job(), raw(), observed(), unserved, at(0)))
    assert status["phase"] == "Queued"
    assert "install Kueue" in condition(status, "Suspended")["message"]
    # Somebody who wants no queues has none.
    ignored = SETTINGS.model_copy(update={"queues": False})
    assert applied(plan(compute_facts(job(), raw(), observed(), ignored, at(0)))) == [*STANDING, "Job/check"]


def test_an_admitted_job_runs_where_its_quota_is() -> None:
    quota = ClusterQuota(flavors={"spot": FLAVOR})
    facts = Observed(children=observed(ADMITTED, deployment(2)).children, quota=quota)
    found = decide(facts)
    assert applied(found) == [*STANDING, BUDGET, "Deployment/generation", "Job/workers"]
    for item in found.apply[-2:]:
        spec = item["spec"]["template"]["spec"]
        assert spec["nodeSelector"] == {"pool": "a100"}
        assert spec["tolerations"] == FLAVOR["tolerations"]
    queued = told(observed())
    status = compute_status(compute_facts(job(), checked(queued), facts, SETTINGS, at(90)))
    assert (status["phase"], reason(status)) == ("Running", ("False", "Admitted"))
    assert status["startTime"] == support.stamp(90)
    assert "Admitted" in [event.reason for event in transitions(queued, status)]


def test_what_an_admission_check_asks_of_the_pods_is_done() -> None:
    update = {
        "name": "generation",
        "nodeSelector": {"node": "n1"},
        "labels": {"l": "1", "kuberoll.io/job": "other"},
        "annotations": {"a": "1"},
        "tolerations": [{"key": "t", "operator": "Exists"}],
    }
    live = workload("QuotaReserved", "Admitted", admissionChecks=[{"state": "Ready", "podSetUpdates": [update]}])
    [engine] = [item for item in decide(observed(live)).apply if item["kind"] == "Deployment"]
    template = engine["spec"]["template"]
    assert template["spec"]["nodeSelector"] == {"node": "n1"}
    assert template["spec"]["tolerations"] == update["tolerations"]
    assert template["metadata"]["annotations"]["a"] == "1"
    assert template["metadata"]["labels"]["l"] == "1"
    assert template["metadata"]["labels"]["kuberoll.io/job"] == "puzzle"


def test_no_more_workers_than_are_paid_for() -> None:
    found = decide(observed(ADMITTED, deployment(2)), workers={"replicas": 4})
    assert found.apply[-1]["spec"]["parallelism"] == 2


@pytest.mark.parametrize(
    ("scale", "most"),
    [
        ({"replicas": 1}, 1),
        ({"replicas": 5}, 2),
        ({"replicas": None, "autoscaling": {"minReplicas": 4, "maxReplicas": 9}}, 2),
        ({"replicas": None, "autoscaling": {"maxReplicas": 1}}, 1),
    ],
    ids=str,
)
def test_no_more_engines_than_are_paid_for(scale: dict[str, Any], most: int) -> None:
    live = deployment(2)
    live["spec"] = {"replicas": 2}
    [found] = [
        item for item in decide(observed(ADMITTED, live), generation=scale).apply if item["kind"] == "Deployment"
    ]
    assert found["spec"]["replicas"] == most
    status = told(observed(ADMITTED, live), generation=scale)
    words = condition(status, conditions.GENERATION_READY)["message"]
    wanted = (scale.get("autoscaling") or {}).get("maxReplicas") or scale["replicas"]
    waits = f"{wanted} are wanted and the admitted quota is for 2: the others wait for the next admission"
    assert (waits in words) == (wanted > 2)
    # Suspended and resumed, the job asks for all of them.
    [asked] = [item for item in decide(observed(), generation=scale).apply if item["kind"] == "Workload"]
    assert asked["spec"]["podSets"][0]["count"] == wanted


def test_groups_are_paid_for_as_a_whole() -> None:
    generation = {
        "engineArgs": {"tensor_parallel_size": 16},
        "resources": {"limits": {"nvidia.com/gpu": "8"}},
        "replicas": 3,
    }
    live = copy.deepcopy(ADMITTED)
    live["status"]["admission"]["podSetAssignments"][0]["count"] = 5
    [found] = [
        item for item in decide(observed(live), generation=generation).apply if item["kind"] == "LeaderWorkerSet"
    ]
    assert found["spec"]["replicas"] == 2


def test_an_evicted_job_gives_its_quota_back_when_its_last_pod_has_ended() -> None:
    begun = told(observed(ADMITTED, deployment(2)), told(observed()))
    worker = pod("workers", shard=0)
    found = decide(observed(EVICTED, deployment(2), workers_job(active=1), pods=[worker]), begun)
    # The worker finishes its turns, for which it needs its engine.
    assert (deleted(found), patches(found)) == ([], [])
    assert found.apply[-1]["spec"]["suspend"] is True
    found = decide(observed(EVICTED, deployment(2), workers_job(suspend=True)), begun)
    assert (deleted(found), patches(found)) == (["Deployment/generation"], [])
    engine = observed(EVICTED, workers_job(suspend=True), pods=[pod("generation")])
    assert patches(decide(engine, begun)) == []
    assert reason(told(engine, begun)) == ("False", "Evicted")
    [patch] = patches(decide(observed(EVICTED, workers_job(suspend=True)), begun))
    assert patch["admission"] is None
    assert kinds(patch) == {
        "QuotaReserved": ("False", "Pending"),
        "Admitted": ("False", "NoReservation"),
        "Evicted": ("True", "Preempted"),
        "PodsReady": ("False", "WaitForStart"),
        "Requeued": ("True", "Preempted"),
    }


@pytest.mark.parametrize("cause", ["PodsReadyTimeout", "AdmissionCheck", "Deactivated", "ClusterQueueStopped"])
def test_kueue_decides_when_others_are_queued_again(cause: str) -> None:
    live = workload("QuotaReserved", "Admitted", "Evicted", reasons={"Evicted": cause})
    [patch] = patches(decide(observed(live)))
    assert kinds(patch)["Requeued"] == ("False", cause)


def test_an_evicted_job_waits_again_with_what_it_has() -> None:
    live = workload("Evicted", reasons={"Evicted": "Preempted"})
    shards = workers_job(suspend=True, succeeded=1)
    found = decide(observed(live, shards))
    assert applied(found) == [*STANDING, "Job/workers", "Workload/workload"]
    # Where its pods are to be is not known: its Job, and the shards that are done in it, stay.
    assert deleted(found) == []
    status = told(observed(live, shards))
    assert reason(status) == ("True", "Queued")
    assert "it was evicted (Preempted: Evicted it is)" in condition(status, "Suspended")["message"]


def test_what_the_api_server_has_put_into_a_job_is_left_to_it() -> None:
    """Of an admitted job that is evicted its Job keeps its shape, and is applied with another one later."""
    first = decide(observed(ADMITTED, deployment(2))).apply[-1]
    generated = {"controller-uid": "1", "job-name": "x", "batch.kubernetes.io/controller-uid": "1"}
    live = copy.deepcopy({**first, "status": {}})
    live["metadata"]["labels"] = first["metadata"]["labels"]
    live["spec"]["suspend"] = True
    live["spec"]["template"]["metadata"]["labels"] |= generated
    live["metadata"]["annotations"][names.SHAPE_DIGEST] = "another"
    [kept] = [item for item in decide(observed(workload(), live)).apply if item["kind"] == "Job"]
    assert kept["spec"]["template"]["metadata"]["labels"] == first["spec"]["template"]["metadata"]["labels"]


def test_a_suspended_job_gives_its_quota_back() -> None:
    assert deleted(decide(observed(ADMITTED, pods=[pod("workers", shard=0)]), suspend=True)) == []
    assert deleted(decide(observed(ADMITTED), suspend=True)) == ["Workload/workload"]
    assert applied(decide(observed(), suspend=True)) == STANDING
    assert told(observed(), suspend=True)["phase"] == "Suspended"


def test_another_queue_is_waited_in_without_what_the_first_one_gave() -> None:
    other = {names.QUEUE_LABEL: "other"}
    found = decide(observed(ADMITTED, deployment(2)), labels=other)
    assert deleted(found) == ["Deployment/generation"]
    assert deleted(decide(observed(ADMITTED), labels=other)) == ["Workload/workload"]
    moved = decide(observed(workload()), labels=other)
    assert moved.apply[-1]["spec"]["queueName"] == "other"
    # Out of all queues, it runs at once.
    free = decide(observed(ADMITTED, deployment(2)), labels={})
    assert (deleted(free), "Job/workers" in applied(free)) == (["Workload/workload"], True)


def test_nothing_of_a_workload_changes_while_it_holds_quota() -> None:
    for live in (ADMITTED, EVICTED, workload("QuotaReserved")):
        assert "Workload/workload" not in applied(decide(observed(live), workers={"replicas": 3}))


def test_priorities_are_looked_up_and_waited_for() -> None:
    labels = {**LABELS, names.PRIORITY_LABEL: "high"}
    assert "Workload/workload" not in applied(decide(observed(), labels=labels))
    assert "WorkloadPriorityClass high does not exist" in str(told(observed(), labels=labels)["conditions"])
    asked = decide(Observed(quota=ClusterQuota(priority=1000)), labels=labels).apply[-1]["spec"]
    assert asked["priority"] == 1000
    assert asked["priorityClassRef"] == {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": "high"}


def test_kueue_is_told_when_all_runs() -> None:
    [patch] = patches(decide(observed(ADMITTED)))
    assert kinds(patch)["PodsReady"] == ("False", "WaitForStart")
    begun = {"conditions": [support.condition("WorkersReady", True, "Running")]}
    [patch] = patches(decide(observed(ADMITTED, deployment(2), workers_job(active=2)), begun))
    assert kinds(patch)["PodsReady"] == ("True", "Started")
    quiet = workload("QuotaReserved", "Admitted", "PodsReady")
    assert patches(decide(observed(quiet, deployment(2), workers_job(active=2)), begun)) == []


def test_what_is_not_needed_to_aggregate_is_free_for_others() -> None:
    live = workload("QuotaReserved", "Admitted", "PodsReady")
    done = workers_job(succeeded=4)
    assert patches(decide(observed(live, deployment(2), done))) == []
    [patch] = patches(decide(observed(live, done)))
    assert patch == {"reclaimablePods": [{"name": "generation", "count": 2}, {"name": "workers", "count": 1}]}
    live["status"] |= patch
    assert patches(decide(observed(live, done, finish_job()))) == []


@pytest.mark.parametrize(("end", "word"), [("Complete", "Succeeded"), ("Failed", "Failed")])
def test_the_quota_is_free_at_the_end(end: str, word: str) -> None:
    over = {"conditions": [support.condition(end, True, "X", "how it ended")]}
    [patch] = patches(decide(observed(ADMITTED), over))
    assert kinds(patch)["Finished"] == ("True", word)
    assert patches(decide(observed(workload("QuotaReserved", "Admitted", "Finished")), over)) == []


def test_a_job_that_cannot_run_does_not_wait_to_be_told_so() -> None:
    status = told(observed(), output={"uri": "runs/x"})
    assert is_true(status, conditions.FAILURE_TARGET)
    assert decide(observed(), output={"uri": "runs/x"}) == Plan()


def test_waiting_uses_up_no_deadline() -> None:
    queued = support.condition("Suspended", True, "Queued")
    unchecked = support.condition("WorkersChecked", False, "Checking", seconds=-9000)
    for live in (workload(), ADMITTED):
        for known in ([queued], [queued, unchecked]):
            early = {"conditions": known, "startTime": support.stamp(-9000)}
            status = told(observed(live), early, activeDeadlineSeconds=60, startupDeadlineSeconds=60)
            assert not condition(status, conditions.FAILURE_TARGET)


def test_a_job_is_looked_at_with_its_own_quota() -> None:
    unchecked = {"conditions": [support.condition("WorkersChecked", False, "Checking")]}
    quota = ClusterQuota(flavors={"spot": FLAVOR})
    found = decide(Observed(children=observed(ADMITTED).children, quota=quota), unchecked)
    assert applied(found) == [*STANDING, "Job/check"]
    assert found.apply[-1]["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "a100"}
    # Evicted meanwhile, it is looked at again on the next nodes.
    facts = observed(EVICTED, support.check_job())
    assert deleted(decide(facts, unchecked)) == ["Job/check"]
    assert reason(told(facts, unchecked), conditions.WORKERS_CHECKED) == ("False", "Checking")


def test_a_workload_of_somebody_elses_is_left_alone() -> None:
    other = {**copy.deepcopy(ADMITTED), "metadata": {"name": "puzzle-workload", "labels": {}}}
    found = decide(observed(other))
    assert (applied(found), deleted(found), patches(found)) == ([], [], [])
    assert "puzzle-workload" in str(told(observed(other), suspend=True)["conditions"]) or found == Plan()


def test_other_controllers_jobs_ask_for_nothing() -> None:
    assert decide(observed(ADMITTED), managedBy="kueue.x-k8s.io/multikueue") == Plan()


class QueuedCluster(Cluster):
    """The same cluster, in which Kueue admits, evicts and loses Workloads as it likes."""

    SETTINGS = SETTINGS

    def __init__(self) -> None:
        super().__init__()
        self.queue: str | None = "team"

    def job(self) -> RolloutJob:
        return job({} if self.queue is None else {names.QUEUE_LABEL: self.queue}, **self.spec)

    @property
    def workload(self) -> Object | None:
        return self.children.get(("Workload", "puzzle-workload"))

    def may_run(self) -> bool:
        live = self.workload
        if self.queue is None:
            return True
        return live is not None and is_true(live["status"], "Admitted") and not is_true(live["status"], "Evicted")

    def engines(self) -> int:
        wanted, live = super().engines(), self.workload
        if self.queue is None or live is None or not self.may_run():
            return wanted
        assigned = live["status"]["admission"]["podSetAssignments"]
        return min(wanted, next(int(item["count"]) for item in assigned if item["name"] == "generation"))

    def something_lives(self) -> bool:
        parts = ("generation", "check", "workers", "finish")
        return ("Deployment", "puzzle-generation") in self.children or any(self.living(part) for part in parts)

    def apply(self, item: Object) -> None:
        begins = item["kind"] == "Deployment" or (item["kind"] == "Job" and not item["spec"]["suspend"])
        assert self.may_run() or not begins
        if (live := self.workload) is not None and "admission" in live["status"] and self.may_run():
            paid_for = {part["name"]: part["count"] for part in live["status"]["admission"]["podSetAssignments"]}
            if item["kind"] == "Deployment" and self.queue is not None:
                assert item["spec"]["replicas"] <= paid_for["generation"]
        if item["kind"] == "Workload" and (live := self.workload) is not None:
            assert "admission" not in live["status"]
        super().apply(item)
        self.children[item["kind"], item["metadata"]["name"]]["metadata"]["resourceVersion"] = "7"

    def patch(self, change: StatusPatch) -> None:
        if change.status.get("admission", "") is None:
            # Nobody is admitted in the place of what still runs.
            assert not self.something_lives()
        super().patch(change)

    def delete(self, kind: str, name: str) -> None:
        if kind == "Workload" and self.queue is not None and "admission" in self.children[kind, name]["status"]:
            assert not self.something_lives()
        super().delete(kind, name)

    @rule()
    def kueue_admits(self) -> None:
        live = self.workload
        if live is None or "admission" in live["status"] or is_true(live["status"], "Finished"):
            return
        sets = live["spec"]["podSets"]
        assignments = [{"name": item["name"], "count": item["count"], "flavors": {"cpu": "spot"}} for item in sets]
        live["status"]["admission"] = {"clusterQueue": "cluster", "podSetAssignments": assignments}
        self.says(live, QuotaReserved="True", Admitted="True", Evicted="False")

    @rule(cause=st.sampled_from(["Preempted", "PodsReadyTimeout"]))
    def kueue_evicts(self, cause: str) -> None:
        live = self.workload
        if live is not None and "admission" in live["status"] and not is_true(live["status"], "Finished"):
            self.says(live, cause, Evicted="True")

    @rule()
    def workload_is_lost(self) -> None:
        self.children.pop(("Workload", "puzzle-workload"), None)

    @rule(queue=st.sampled_from(["team", "other", None]))
    def is_moved(self, queue: str | None) -> None:
        self.queue = queue

    def says(self, live: Object, cause: str = "Because", **statuses: str) -> None:
        found = {item["type"]: item for item in live["status"].get("conditions", ())}
        for kind, status in statuses.items():
            found[kind] = {
                "type": kind,
                "status": status,
                "reason": cause,
                "message": "it is so",
                "lastTransitionTime": support.stamp(self.seconds),
            }
        live["status"]["conditions"] = list(found.values())

    @rule()
    def generation_becomes_ready(self) -> None:
        """In the end, too, Kueue admits what waits."""
        self.kueue_admits()
        super().generation_becomes_ready()


TestQueuedCluster = QueuedCluster.TestCase
TestQueuedCluster.settings = settings(max_examples=examples(60), stateful_step_count=examples(40), deadline=None)
