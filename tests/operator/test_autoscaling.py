"""Native autoscaling: bounds always hold, delays are waited for, nothing shrinks on what is not known."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kuberoll_api.contract import PodProgress, fewest_replicas
from kuberoll_api.model.generation import Autoscaling
from kuberoll_operator import names
from kuberoll_operator.backends import BACKENDS, autoscaling
from kuberoll_operator.backends.autoscaling import Decision, Intent, Load, decide, describe, replicas_for
from kuberoll_operator.backends.native import load_of
from kuberoll_operator.facts import compute_facts
from kuberoll_operator.model import Object
from kuberoll_operator.plan import plan
from kuberoll_operator.render import seal
from tests.operator import support
from tests.operator.support import START, at, job, observed, pod, raw

SPEC = Autoscaling.model_validate({"minReplicas": 1, "maxReplicas": 8, "targetOngoingRequests": 64})


@pytest.mark.parametrize(
    ("generating", "expected"), [(0, 1), (1, 1), (64, 1), (65, 2), (128, 2), (512, 8), (10_000, 8)]
)
def test_what_a_load_calls_for(generating: int, expected: int) -> None:
    assert replicas_for(SPEC, Load(generating, True)) == expected


def test_a_job_that_goes_on_always_has_a_replica() -> None:
    none = Autoscaling.model_validate({"minReplicas": 0, "maxReplicas": 4})
    assert fewest_replicas(none) == replicas_for(none, Load(0, True)) == 1


def test_more_after_the_delay_and_not_before() -> None:
    first = decide(SPEC, Load(200, True), 1, None, at(0))
    assert first == Decision(1, Intent(4, at(0)))
    assert decide(SPEC, Load(200, True), 1, first.intent, at(9)).replicas == 1
    # The last load counts.
    assert decide(SPEC, Load(300, True), 1, first.intent, at(10)) == Decision(5, None)


def test_fewer_after_a_longer_delay_and_no_fewer_than_were_needed_meanwhile() -> None:
    first = decide(SPEC, Load(0, True), 8, None, at(0))
    busier = decide(SPEC, Load(200, True), 8, first.intent, at(60))
    assert busier == Decision(8, Intent(4, at(0)))
    assert decide(SPEC, Load(0, True), 8, busier.intent, at(120)) == Decision(4, None)


def test_a_change_of_mind_begins_the_delay_anew() -> None:
    up = decide(SPEC, Load(200, True), 2, None, at(0))
    assert decide(SPEC, Load(128, True), 2, up.intent, at(5)) == Decision(2, None)
    assert decide(SPEC, Load(0, True), 2, up.intent, at(9)) == Decision(2, Intent(1, at(9)))


def test_workers_that_do_not_tell_may_be_busy() -> None:
    assert decide(SPEC, Load(0, False), 8, Intent(1, START), at(9_999)) == Decision(8, None)
    assert decide(SPEC, Load(600, False), 1, Intent(8, START), at(10)) == Decision(8, None)


class Scaled(RuleBasedStateMachine):
    """A Deployment over time: what was decided, and what was called for at every look."""

    @initialize(
        low=st.integers(0, 5),
        span=st.integers(0, 10),
        each=st.floats(0.5, 100),
        up=st.sampled_from([0, 10, 60]),
        down=st.sampled_from([0, 30, 120]),
    )
    def begin(self, low: int, span: int, each: float, up: int, down: int) -> None:
        fields = {"minReplicas": low, "maxReplicas": max(1, low + span), "targetOngoingRequests": each}
        delays = {"upscaleDelaySeconds": up, "downscaleDelaySeconds": down}
        self.spec = Autoscaling.model_validate({**fields, **delays})
        self.now, self.current = START, fewest_replicas(self.spec)
        self.intent: Intent | None = None
        self.looks: list[tuple[datetime, int, int, bool]] = []

    @rule(generating=st.integers(0, 2000), known=st.booleans(), seconds=st.integers(0, 90))
    def look(self, generating: int, known: bool, seconds: int) -> None:
        self.now += timedelta(seconds=seconds)
        load = Load(generating, known)
        before = self.current
        found = decide(self.spec, load, before, self.intent, self.now)
        # What is waited with survives a restart of the operator.
        text = {} if found.intent is None else {names.AUTOSCALING: autoscaling.intent_annotation(found.intent)}
        self.intent = autoscaling.read_intent({"metadata": {"annotations": text}})
        assert self.intent == found.intent
        self.looks.append((self.now, replicas_for(self.spec, load), before, known))
        self.current = found.replicas
        if found.replicas == before:
            return
        up = found.replicas > before
        delay = self.spec.upscale_delay_seconds if up else self.spec.downscale_delay_seconds
        # Of several looks at the moment it began, the last one counts.
        since = [item for item in self.looks[:-1] if item[0] > self.now - timedelta(seconds=delay)] + self.looks[-1:]
        for _, wanted, current, told in since:
            # All through the delay it was called for, of the same number of replicas.
            assert current == before
            assert wanted > before if up else (wanted < before and told)
            assert up or found.replicas >= wanted
        self.looks = []

    @invariant()
    def within_bounds(self) -> None:
        if hasattr(self, "spec"):
            assert fewest_replicas(self.spec) <= self.current <= self.spec.max_replicas
            assert self.current >= 1


TestScaled = Scaled.TestCase


@given(st.text(max_size=40))
def test_an_annotation_that_somebody_else_wrote_is_none(text: str) -> None:
    found = autoscaling.read_intent({"metadata": {"annotations": {names.AUTOSCALING: text}}})
    assert found is None or isinstance(found, Intent)


def scaled_job(**more: Any) -> Any:
    return job(generation={"replicas": None, "autoscaling": {"maxReplicas": 8}, **more})


def told(shard: int, generating: int) -> PodProgress:
    return PodProgress(shard=shard, generating=generating)


def test_the_load_is_of_the_workers_that_run() -> None:
    pods = [pod("workers", str(shard), shard=shard) for shard in range(2)]
    pods.append(pod("workers", "done", shard=2, phase="Succeeded"))
    assert load_of(observed(pods=pods, progress={0: told(0, 70)})) == Load(70, False)
    assert load_of(observed(pods=pods, progress={0: told(0, 70), 1: told(1, 30)})) == Load(100, True)
    assert load_of(observed()) == Load(0, True)


def test_a_deployment_follows_the_load_and_nothing_else_of_it_changes() -> None:
    pods = [pod("workers", str(shard), shard=shard) for shard in range(2)]
    progress = {shard: told(shard, 150) for shard in range(2)}
    workers = support.workers_job()
    status = {
        "generation": {"backend": "Native"},
        "conditions": [support.condition("GenerationReady", True, "Ready")],
        "startTime": support.stamp(0),
    }

    def deployment_at(seconds: float, live: Object | None) -> Object:
        seen = observed(workers, *([live] if live else []), pods=pods, progress=progress)
        found = plan(compute_facts(scaled_job(), raw(status), seen, support.SETTINGS, at(seconds)))
        return next(item for item in found.apply if item["kind"] == "Deployment")

    def live(item: Object) -> Object:
        return {
            **item,
            "status": {"observedGeneration": 1, "readyReplicas": 1},
            "metadata": {**item["metadata"], "generation": 1},
        }

    first = deployment_at(0, None)
    assert first["spec"]["replicas"] == 1
    waiting = deployment_at(1, live(first))
    assert waiting["spec"]["replicas"] == 1
    assert names.AUTOSCALING in waiting["metadata"]["annotations"]
    # Nothing is written while nothing changes.
    assert deployment_at(5, live(waiting)) == waiting
    more = deployment_at(16, live(waiting))
    assert more["spec"]["replicas"] == 5
    assert more["spec"]["template"] == first["spec"]["template"]
    assert names.AUTOSCALING not in more["metadata"]["annotations"]
    assert seal(more) == more


def test_what_is_decided_can_be_read() -> None:
    pods = [pod("workers", "a", shard=0)]
    deployment = support.deployment(2, readyReplicas=2)
    deployment["spec"]["replicas"] = 2
    state = BACKENDS["Native"].state(scaled_job(), observed(deployment, pods=pods, progress={0: told(0, 97)}))
    assert (state.ready, state.desired) == (2, 2)
    assert state.note == "97 turns at 64 per replica call for 2, within 1 to 8"
    assert "not all workers" in describe(SPEC, Load(0, False))
