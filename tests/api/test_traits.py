"""Traits: every field of a job has them, and what is decided by them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import pytest
from pydantic import BaseModel

from kuberoll_api.model import traits
from kuberoll_api.model.rolloutjob import RolloutJobSpec
from kuberoll_api.model.traits import IDENTITY, OPERATION, POD, Traits
from kuberoll_api.schema.rules import AT_ANY_TIME, ONLY_SUSPENDED


def incomplete(model: type[BaseModel], path: str = "spec", parent: Traits | None = None) -> Iterator[str]:
    """Paths of fields that nobody has said some kind of trait of."""
    for field in traits.fields(model, parent or Traits()):
        here = f"{path}.{field.alias}"
        missing = [name for name in Traits.__slots__ if getattr(field.traits, name) is None]
        if missing and field.model is not None:
            yield from incomplete(field.model, here, field.traits)
        elif missing:
            yield f"{here}: {', '.join(missing)}"


def paths(model: type[BaseModel], path: str, parent: Traits, kind: str, value: object) -> Iterator[str]:
    """Paths of the outermost fields that have a trait."""
    for field in traits.fields(model, parent):
        here = f"{path}.{field.alias}"
        if getattr(field.traits, kind) == value:
            yield here
        elif field.model is not None:
            yield from paths(field.model, here, field.traits, kind, value)


def test_every_field_has_traits_of_all_kinds() -> None:
    assert list(incomplete(RolloutJobSpec)) == []


def test_a_field_without_a_trait_is_found() -> None:
    class Inner(BaseModel):
        known: Annotated[int, IDENTITY]
        new: int

    class Outer(BaseModel):
        inner: Annotated[list[Inner] | None, Traits(change="Suspended", reader="Pods", place="Anywhere")]

    assert list(incomplete(Outer)) == ["spec.inner.new: identity"]


def test_what_makes_a_run_another_run() -> None:
    found = [path.removeprefix("spec.") for path in paths(RolloutJobSpec, "spec", Traits(), "identity", True)]
    assert found == [
        "generation.model", "generation.engine", "generation.engineArgs", "generation.toolCallParser",
        "generation.reasoningParser", "generation.simulated", "generation.sampling",
        "generation.external.api", "generation.external.model",
        "services.name", "services.model", "services.engineArgs",
        "environments.name", "environments.type", "environments.entrypoint",
        "environments.agent.entrypoint", "environments.agent.command", "environments.agent.tools",
        "environments.agent.setup", "environments.agent.score", "environments.agent.hidden",
        "environments.sandbox.image", "environments.sandbox.variables", "environments.sandbox.user",
        "environments.sandbox.workdir", "environments.sandbox.network",
        "environments.config", "environments.repeats",
        "dataset.sources.name", "dataset.sources.weight", "dataset.sources.limit", "dataset.sources.environment",
        "dataset.sources.columns", "dataset.sources.promptTemplate",
        "dataset.limit", "dataset.shuffleSeed", "dataset.epochs", "dataset.repeats", "dataset.columns",
        "dataset.promptTemplate",
        "rollout.maxTurns", "rollout.maxSequenceLength", "rollout.observationTemplate", "rollout.groups",
            "rollout.onPolicy",
    ]  # fmt: skip


def test_what_a_running_job_may_change() -> None:
    assert ONLY_SUSPENDED == ("services", "environments", "dataset", "rollout", "output")
    assert AT_ANY_TIME == {"generation": ("replicas", "autoscaling"), "workers": ("replicas",)}
    assert list(paths(RolloutJobSpec, "spec", Traits(), "change", "Never")) == ["spec.managedBy"]


def test_traits_of_a_field_prevail_over_its_parents() -> None:
    assert POD | Traits(place="Anywhere") == Traits(identity=False, reader="Operator", place="Anywhere")
    assert Traits(change="AnyTime") | OPERATION == Traits(identity=False, change="AnyTime")
    assert Traits() | IDENTITY == IDENTITY


class Leaf(BaseModel):
    kept: Annotated[int, IDENTITY]
    other: Annotated[int, OPERATION] = 0


class Tree(BaseModel):
    leaf: Leaf
    leaves: list[Leaf]
    absent: Leaf | None = None
    whole: Annotated[Leaf, IDENTITY]
    none: Annotated[Leaf, OPERATION]


TREE = Tree(
    leaf=Leaf(kept=1),
    leaves=[Leaf(kept=2), Leaf(kept=3)],
    whole=Leaf(kept=4),
    none=Leaf(kept=5),
)


def test_values_are_selected_by_the_traits_of_their_fields() -> None:
    assert traits.select(TREE, lambda field: field.identity is True, Traits()) == {
        "leaf": {"kept": 1},
        "leaves": [{"kept": 2}, {"kept": 3}],
        "whole": {"kept": 4, "other": 0},
        "none": {"kept": 5},
    }


@pytest.mark.parametrize("given", [{"leaf": {"kept": 1, "other": 2}, "none": {"other": 1}}, {"leaf": {"kept": 1}}])
def test_fields_are_left_out_by_their_traits(given: dict[str, object]) -> None:
    kept = traits.without(given, Tree, lambda field: field.identity is False, Traits())
    assert kept == {"leaf": {"kept": 1}}
