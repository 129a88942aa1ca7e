"""Pods outside a job that may use its policy: which ones they are, their tokens, and what these allow."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from kuberoll_api.model.contradictions import contradiction
from kuberoll_api.model.types import (
    CONFIG_MAP_KEY_PATTERN,
    LABEL_KEY_PATTERN,
    LABEL_VALUE_PATTERN,
    DnsLabel,
    DnsName,
    Labels,
    Model,
)

Scope = Literal["generate", "weights", "read"]
"""Permission of a token: `generate` samples, `weights` publishes weights, `read` reads the policy's state.

A token that has no other scope also opens the direct path of workers, to the records that they have written.
"""

MAX_ACCESS = 16


class LabelRequirement(Model):
    """A condition on one label, as in Kubernetes."""

    key: Annotated[str, StringConstraints(pattern=LABEL_KEY_PATTERN, min_length=1, max_length=317)] = Field(
        description="Key of the label."
    )
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"] = Field(description="Relation of the label to values.")
    values: list[Annotated[str, StringConstraints(pattern=LABEL_VALUE_PATTERN, max_length=63)]] = Field(
        default_factory=list, max_length=32, description="Values of the label, with In and NotIn."
    )

    @model_validator(mode="after")
    def _values_fit(self) -> Self:
        compares = self.operator in ("In", "NotIn")
        if compares and not self.values:
            raise contradiction(f"{self.operator} needs at least one value", "values")
        if not compares and self.values:
            raise contradiction(f"{self.operator} has no values; remove them, or use In or NotIn", "values")
        return self


class LabelSelector(Model):
    """A selection by labels, as in Kubernetes: all conditions must hold, and without one everything is selected."""

    match_labels: Labels = Field(default_factory=dict, description="Labels that are required, with their values.")
    match_expressions: list[LabelRequirement] = Field(
        default_factory=list, max_length=16, description="Further conditions."
    )

    def as_json(self) -> dict[str, object]:
        """The selector as Kubernetes writes it, without empty parts."""
        labels, expressions = dict(sorted(self.match_labels.items())), self.match_expressions
        return {
            **({"matchLabels": labels} if labels else {}),
            **(
                {"matchExpressions": [item.model_dump(by_alias=True, exclude_defaults=True) for item in expressions]}
                if expressions
                else {}
            ),
        }


class TokenSecret(Model):
    """A Secret with a token of one's own."""

    name: DnsName = Field(description="Name of a Secret in the job's namespace.")
    key: Annotated[str, StringConstraints(pattern=CONFIG_MAP_KEY_PATTERN, min_length=1, max_length=253)] = Field(
        default="token", description="Key of the Secret, whose value is the token: at least 16 visible characters."
    )


class PolicyAccess(Model):
    """Pods outside the job that may use its policy: other jobs, judges, trainers."""

    name: DnsLabel = Field(
        description="Name of this access. Without tokenSecret the operator makes the Secret JOB-access-NAME, with "
        "KUBEROLL_POLICY_URL and KUBEROLL_POLICY_TOKEN, for envFrom in pods of the job's namespace."
    )
    pod_selector: LabelSelector | None = Field(
        default=None,
        description="Labels of the pods, as in a NetworkPolicy; {}: all. Without namespaceSelector they are in the "
        "job's namespace.",
    )
    namespace_selector: LabelSelector | None = Field(
        default=None,
        description="Labels of the pods' namespaces, as in a NetworkPolicy; {}: all. Without podSelector it is all "
        "pods of these namespaces.",
    )
    scopes: list[Scope] = Field(
        default=["generate"],
        min_length=1,
        max_length=3,
        description="What the token allows: generate samples, weights publishes weights, read reads the policy's "
        "state, as the other two do. A token with read alone also reads finished trajectories from the workers.",
    )
    token_secret: TokenSecret | None = Field(
        default=None,
        description="A Secret that has the token already, for pods of other namespaces or those that outlive the job. "
        "Absent: the operator derives a token.",
    )

    @model_validator(mode="after")
    def _selects(self) -> Self:
        if self.pod_selector is None and self.namespace_selector is None:
            raise contradiction(
                "set podSelector, namespaceSelector or both: without one it is not said whose access this is"
            )
        return self
