"""Traits of fields: facts about the fields of a job that several parts of KubeRoll depend on.

A trait is part of its field's `Annotated` type. It applies to everything in the field, unless a field below has its
own; every field below `spec` has one of each kind.
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
    """Traits of one field; None: inherited from its parent.

    Attributes:
        identity: True if another value would produce other trajectories, so that a run cannot be resumed with it.
        change: When the value of a job in a cluster may change.
        reader: `Operator` if pods do not receive the value.
        place: `Cluster` if the value has no effect on a single machine.
    """

    identity: bool | None = None
    change: Literal["AnyTime", "Suspended", "Never"] | None = None
    reader: Literal["Operator", "Pods"] | None = None
    place: Literal["Anywhere", "Cluster"] | None = None

    def __or__(self, other: Traits) -> Traits:
        """These traits, overridden by those that the other one sets."""
        given = {name: value for name in self.__slots__ if (value := getattr(other, name)) is not None}
        return dataclasses.replace(self, **given)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelField:
    """A field of a model, with its effective traits."""

    name: str
    alias: str
    traits: Traits
    model: type[BaseModel] | None


def fields(model: type[BaseModel], parent: Traits) -> Iterator[ModelField]:
    """The fields of a model.

    Args:
        parent: Traits of the field that holds the model.
    """
    for name, info in model.model_fields.items():
        yield ModelField(name, info.alias or name, parent | own_traits(info), _model_of(info.annotation))


def own_traits(info: FieldInfo) -> Traits:
    """Traits in the field's own annotation."""
    return next((item for item in info.metadata if isinstance(item, Traits)), Traits())


def any_field(model: type[BaseModel] | None, holds: Callable[[Traits], bool], parent: Traits) -> bool:
    """True if the predicate holds for a field of a model, or of a model inside it."""
    if model is None:
        return False
    return any(holds(field.traits) or any_field(field.model, holds, field.traits) for field in fields(model, parent))


def select(value: BaseModel, holds: Callable[[Traits], bool], parent: Traits) -> dict[str, Any]:
    """Values of the fields whose traits satisfy the predicate, as JSON, nested like the model."""
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
    """A model as JSON, without the fields whose traits satisfy the predicate."""
    kept = dict(given)
    for field in fields(model, parent):
        if field.alias not in kept:
            continue
        if drops(field.traits):
            del kept[field.alias]
        elif (model_of := field.model) is not None:
            inner, traits = kept[field.alias], field.traits
            if isinstance(inner, Mapping):
                kept[field.alias] = without(inner, model_of, drops, traits)
            elif isinstance(inner, list) and any_field(model_of, drops, traits):
                kept[field.alias] = [without(item, model_of, drops, traits) for item in inner]
    return kept


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The model in a type: the type itself, or the type of a list's items; None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for item in typing.get_args(annotation) if (model := _model_of(item)) is not None), None)


# Traits of fields.
IDENTITY = Traits(identity=True)
OPERATION = Traits(identity=False)
# Pod options: not passed to pods, where environments run; on one machine only variables and GPUs have an effect.
POD = Traits(identity=False, reader="Operator", place="Cluster")
POD_ANYWHERE = POD | Traits(place="Anywhere")
