"""Whose turn it is when the cluster has no room: by cases, and by a small cluster with random jobs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kuberoll_operator.facts import Stage, compute_facts
from kuberoll_operator.model import Key, Object
from kuberoll_operator.plan import plan
from kuberoll_operator.status.job_status import compute_status
from kuberoll_operator.turns import Turns
from tests.examples import examples
from tests.operator.support import (
    SETTINGS,
    at,
    condition,
    deployment,
    job,
    observed,
    pod,
    raw,
    stamp,
    unschedulable,
    workers_job,
)

OLD, YOUNG = Key("team", "old"), Key("team", "young")
SECONDS = 300.0
CHECKED = condition("WorkersChecked", True, "Checked")


def status(generation: tuple[bool, str], workers: tuple[bool, str], phase: str = "Running", ended: float = 0) -> Object:
    """A job's status with these two conditions, and the time since when no worker runs."""
    parts = [condition("GenerationReady", *generation), condition("WorkersReady", *workers, seconds=ended)]
    return {"phase": phase, "conditions": parts}


HOLDS = status((True, "Ready"), (False, "Unschedulable"))
PENDING = status((False, "Unschedulable"), (False, "WaitingForGeneration"), "Starting")
RUNS = status((True, "Ready"), (True, "Running"))


def created(seconds: float) -> Object:
    return raw(creationTimestamp=stamp(seconds))


def turns(old: Object | None = HOLDS, young: Object | None = HOLDS) -> Turns:
    """Turns of two jobs, of which these were the statuses at the beginning."""
    found = Turns(SECONDS)
    for key, given_status, time in ((OLD, old, 0), (YOUNG, young, 10)):
        if given_status is not None:
            found.note(key, created(time), given_status, at(0))
    return found


@pytest.mark.parametrize("young", [HOLDS, PENDING], ids=["with engines", "without"])
def test_the_younger_steps_back_for_the_older_when_both_have_waited_a_while(young: Object) -> None:
    found = turns(young=young)
    assert found.first(YOUNG, created(10), at(299)) is None
    assert found.first(YOUNG, created(10), at(300)) == OLD
    assert found.first(OLD, created(0), at(300)) is None


@pytest.mark.parametrize(
    ("old", "young"),
    [
        (RUNS, HOLDS),
        (PENDING, HOLDS),
        (HOLDS, RUNS),
        (HOLDS, None),
        (HOLDS, status((True, "Ready"), (False, "Starting"))),
        # It has run, and its engines are given back by another rule.
        (HOLDS, status((True, "Ready"), (False, "Unschedulable"), ended=20)),
        (status((True, "External"), (False, "Unschedulable")), HOLDS),
        (status((True, "Ready"), (False, "Unschedulable"), "Suspended"), HOLDS),
    ],
    ids=["old runs", "old holds nothing", "young runs", "young is new", "young starts", "young has run", "external",
         "suspended"],
)  # fmt: skip
def test_nobody_steps_back_in_vain(old: Object, young: Object | None) -> None:
    assert turns(old, young).first(YOUNG, created(10), at(900)) is None


def test_who_steps_back_goes_on_when_the_older_has_room() -> None:
    found = turns()
    assert found.first(YOUNG, created(10), at(300)) == OLD
    found.note(OLD, created(0), RUNS, at(310))
    assert found.first(YOUNG, created(10), at(310)) is None


@pytest.mark.parametrize("end", ["forget", "note"])
def test_who_steps_back_goes_on_when_the_older_is_gone(end: str) -> None:
    found = turns()
    assert found.first(YOUNG, created(10), at(300)) == OLD
    if end == "forget":
        found.forget(OLD)
    else:
        found.note(OLD, created(0), {**HOLDS, "phase": "Failed"}, at(310))
    assert found.first(YOUNG, created(10), at(310)) is None


def test_who_steps_back_tries_again_because_the_older_may_wait_for_something_else() -> None:
    found = turns()
    assert found.first(YOUNG, created(10), at(300)) == OLD
    found.note(YOUNG, created(10), status((False, "WaitingForTurn"), (False, "WaitingForGeneration")), at(300))
    assert found.first(YOUNG, created(10), at(899)) == OLD
    assert found.first(YOUNG, created(10), at(900)) is None
    found.note(YOUNG, created(10), PENDING, at(905))
    assert found.first(YOUNG, created(10), at(1204)) is None
    assert found.first(YOUNG, created(10), at(1205)) == OLD


BEGUN = {"conditions": [CHECKED, *HOLDS["conditions"]]}
NO_NODE = pod("workers", "0", shard=0, phase="Pending", conditions=unschedulable("0/3 nodes: Insufficient cpu."))


STEPPING_BACK = replace(observed(deployment(2), workers_job(active=1), pods=[NO_NODE]), first=OLD)


def test_a_job_that_steps_back_holds_nothing_and_says_for_whom() -> None:
    facts = compute_facts(job(), raw(BEGUN), STEPPING_BACK, SETTINGS, at(60))
    assert facts.stage is Stage.STARTING
    planned = plan(facts)
    assert "puzzle-generation" in {item.name for item in planned.delete if item.kind == "Deployment"}
    [workers] = [item for item in planned.apply if item["kind"] == "Job"]
    assert workers["spec"]["suspend"] is True
    found = {item["type"]: item for item in compute_status(facts)["conditions"]}
    assert found["GenerationReady"]["reason"] == "WaitingForTurn"
    assert found["GenerationReady"]["message"].startswith("the cluster has no room: ")
    seen = replace(observed(workers_job(suspend=True)), first=OLD)
    later = compute_facts(job(), raw(dict(compute_status(facts))), seen, SETTINGS, at(61))
    assert [item for item in plan(later).apply if item["kind"] == "Deployment"] == []
    found = {item["type"]: item for item in compute_status(later)["conditions"]}
    assert found["WorkersReady"]["reason"] == "WaitingForGeneration"


@pytest.mark.parametrize(
    ("namespace", "words"), [("default", "the older job old"), ("x", "an older job of another na")]
)
def test_the_names_of_other_namespaces_are_not_told(namespace: str, words: str) -> None:
    there = raw(BEGUN)
    there["metadata"]["namespace"] = "default"
    facts = compute_facts(job(), there, replace(STEPPING_BACK, first=Key(namespace, "old")), SETTINGS, at(60))
    [found] = [item for item in compute_status(facts)["conditions"] if item["type"] == "GenerationReady"]
    assert words in found["message"]


def test_a_job_with_a_worker_never_steps_back() -> None:
    runs = pod("workers", "0", shard=0, container={"ready": True, "state": {"running": {}}})
    seen = replace(STEPPING_BACK, pods=[runs])
    facts = compute_facts(job(), raw(BEGUN), seen, SETTINGS, at(60))
    assert facts.first is None
    assert facts.stage is Stage.RUNNING


TURN_SECONDS = 2


class Small:
    """A cluster with so many places, on which a job has an engine, then a worker for some time, each in one place.

    Its scheduler gives a free place to any pod that waits: a real one promises no order either.
    """

    def __init__(self, places: int, jobs: int, choices: list[int]) -> None:
        self.places, self.choices = places, choices
        self.turns = Turns(TURN_SECONDS)
        self.keys = [Key("team", f"{number:03}") for number in range(jobs)]
        self.engine: dict[Key, bool] = {}
        self.worker: dict[Key, int | None] = {}
        self.ended: list[Key] = []
        # Those that have had everything before anybody could have waited for long, since the cluster was empty.
        self.lucky: set[Key] = set()
        self.time = self.began = 0

    def step(self) -> None:
        """A second: reconciles, the scheduler, and the work."""
        self.time += 1
        for key in self.keys:
            if key in self.ended:
                continue
            first = None if self.worker.get(key) is not None else self.turns.first(key, self._raw(key), at(self.time))
            if first is None:
                self.engine.setdefault(key, False)
                if self.engine[key]:
                    self.worker.setdefault(key, None)
            else:
                self.engine.pop(key, None)
                self.worker.pop(key, None)
        pods = [("engine", key) for key, placed in self.engine.items() if not placed]
        pods += [("worker", key) for key, left in self.worker.items() if left is None]
        used = sum(self.engine.values()) + sum(left is not None for left in self.worker.values())
        if not used:
            self.began = self.time
        while pods and used < self.places:
            kind, key = pods.pop((self.choices.pop(0) if self.choices else 0) % len(pods))
            if kind == "engine":
                self.engine[key] = True
            else:
                self.worker[key] = 3
                if self.time - self.began <= TURN_SECONDS + 1:
                    self.lucky.add(key)
            used += 1
        for key in self.keys:
            if key in self.ended:
                continue
            left = self.worker.get(key)
            if left is not None:
                self.worker[key] = left - 1
                if left == 1:
                    self.ended.append(key)
                    del self.engine[key], self.worker[key]
                    self.turns.forget(key)
                    continue
            self.turns.note(key, self._raw(key), self._status(key), at(self.time))

    def _raw(self, key: Key) -> Object:
        return raw(creationTimestamp=stamp(int(key.name)))

    def _status(self, key: Key) -> Object:
        if self.worker.get(key) is not None:
            return RUNS
        return HOLDS if self.engine.get(key) else PENDING if key in self.engine else {}


@example(2, 9, [0, 0, 0, 6, 6, 6])
@given(st.integers(2, 6), st.integers(1, 12), st.lists(st.integers(0, 30), max_size=120))
@settings(max_examples=examples(60), deadline=None)
def test_many_jobs_on_a_small_cluster_all_end_and_the_oldest_without_a_worker_waits_for_no_younger_one(
    places: int, jobs: int, choices: list[int]
) -> None:
    small = Small(places, jobs, choices)
    bound = 40 * jobs + 40
    while len(small.ended) < jobs and small.time < bound:
        small.step()
    assert len(small.ended) == jobs
    # Whatever the scheduler chose: nobody ends more than the cluster's places and a round before who came much earlier.
    for place, key in enumerate(small.ended):
        assert key in small.lucky or place >= int(key.name) - 2 * places - 1
