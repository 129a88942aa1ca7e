"""Traits of fields: facts about a field of a job by which several parts of KubeRoll decide.

A trait stands beside its field, in `Annotated`. It holds for all that the field contains, unless a field below it has
its own; every field below `spec` has one of each kind.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What is known of a field; None: what its parent says.

    Attributes:
        identity: Whether another value makes other trajectories, so that a run is not resumed with it.
        change: When a job in a cluster may be given another value.
        reader: `Operator`: pods are not told the value.
        place: `Cluster`: the value has no effect where a job runs on one machine.
    """

    identity: bool | None = None
    change: Literal["AnyTime", "Suspended", "Never"] | None = None
    reader: Literal["Operator", "Pods"] | None = None
    place: Literal["Anywhere", "Cluster"] | None = None

    def __or__(self, other: Traits) -> Traits:
        """These traits, where the other says nothing."""
        given = {name: value for name in self.__slots__ if (value := getattr(other, name)) is not None}
        return dataclasses.replace(self, **given)


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """A field of a model, with the traits that hold for it."""

    name: str
    alias: str
    traits: Traits
    model: type[BaseModel] | None


def fields(model: type[BaseModel], parent: Traits) -> Iterator[Field]:
    """The fields of a model.

    Args:
        parent: Traits of the field that holds the model.
    """
    for name, info in model.model_fields.items():
        yield Field(name, info.alias or name, parent | own_traits(info), _model_of(info.annotation))


def own_traits(info: FieldInfo) -> Traits:
    """The traits that stand beside a field."""
    return next((item for item in info.metadata if isinstance(item, Traits)), Traits())


def any_field(model: type[BaseModel] | None, holds: Callable[[Traits], bool], parent: Traits) -> bool:
    """Whether something holds for a field of a model, or of a model in it."""
    if model is None:
        return False
    return any(holds(field.traits) or any_field(field.model, holds, field.traits) for field in fields(model, parent))


def select(value: BaseModel, holds: Callable[[Traits], bool], parent: Traits) -> dict[str, Any]:
    """The values of those fields for whose traits something holds, as JSON, in the form of the model."""
    found: dict[str, Any] = {}
    plain = value.model_dump(mode="json", by_alias=True)
    for field in fields(type(value), parent):
        inner = getattr(value, field.name)
        if holds(field.traits):
            found[field.alias] = plain[field.alias]
        elif inner is not None and any_field(field.model, holds, field.traits):
            if isinstance(inner, list):
                found[field.alias] = [select(item, holds, field.traits) for item in inner]
            else:
                found[field.alias] = select(inner, holds, field.traits)
    return found


def without(
    given: Mapping[str, Any], model: type[BaseModel], drops: Callable[[Traits], bool], parent: Traits
) -> dict[str, Any]:
    """A model as JSON, without those fields for whose traits something holds."""
    kept = dict(given)
    for field in fields(model, parent):
        if field.alias not in kept:
            continue
        if drops(field.traits):
            del kept[field.alias]
        elif field.model is not None and isinstance(kept[field.alias], Mapping):
            kept[field.alias] = without(kept[field.alias], field.model, drops, field.traits)
    return kept


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The model that values of a type are, or that lists of it hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for item in typing.get_args(annotation) if (model := _model_of(item)) is not None), None)


# Traits of fields.
IDENTITY = Traits(identity=True)
OPERATION = Traits(identity=False)
# How pods are made: not to be read where environments run, and nothing for one machine but variables and GPUs.
POD = Traits(identity=False, reader="Operator", place="Cluster")
POD_ANYWHERE = POD | Traits(place="Anywhere")
