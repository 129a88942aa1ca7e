"""CEL rules: checks of the API server beyond types and bounds, by the model that they belong to.

The models' own validators reject the same jobs, with better messages that show the value. If a rule were missing here,
a job would be accepted and fail at once; if a rule were only here, a cluster would reject a job that runs on a laptop.
Only the rules about changes of existing jobs have no counterpart in the models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from pydantic.alias_generators import to_camel

from kuberoll_api.model.access import LabelRequirement, PolicyAccess
from kuberoll_api.model.agents import Agent
from kuberoll_api.model.chat_template import NO_TEMPLATE
from kuberoll_api.model.dataset import Dataset
from kuberoll_api.model.environments import OF_THE_TEMPLATE, OF_THE_TEMPLATE_MESSAGE, Environment, EnvironmentServers
from kuberoll_api.model.generation import Autoscaling, Generation, ModelSource, Sampling
from kuberoll_api.model.output import Output, Tracking
from kuberoll_api.model.pods import PodOptions
from kuberoll_api.model.rollout import Groups, OnPolicy, Rollout
from kuberoll_api.model.rolloutjob import WHOLE_NUMBER, RolloutJob, RolloutJobSpec
from kuberoll_api.model.sandboxes import SandboxNetwork
from kuberoll_api.model.services import GPU, ModelService
from kuberoll_api.model.traits import Traits, fields
from kuberoll_api.model.types import JOB_NAME_PATTERN, MAX_NAME_LENGTH, PVC_PATTERN
from kuberoll_api.model.workers import Workers

_SPEC: Final = {field.name: field for field in fields(RolloutJobSpec, Traits())}
_PARTS: Final = {
    name: tuple(fields(model, _SPEC[name].traits)) for name, model in (("generation", Generation), ("workers", Workers))
}
"""Fields of the parts of the spec that have some which can change while a job runs, and others which cannot."""

ONLY_SUSPENDED: Final = tuple(
    field.alias for field in _SPEC.values() if field.traits.change == "Suspended" and field.name not in _PARTS
)
"""Fields of the spec that cannot change while a job runs."""

AT_ANY_TIME: Final = {
    part: tuple(field.alias for field in found if field.traits.change == "AnyTime") for part, found in _PARTS.items()
}
"""Fields of `generation` and `workers` that can change while a job runs; all others are like ONLY_SUSPENDED."""

# Of the fields that cannot change, the list that has neither a default nor an item that is required.
_MAY_BE_ABSENT: Final = ("services",)

# Of the fields that have rules of their own, those with free keys.
_FREE: Final = ("generation.engineArgs",)

_SUSPEND_FIRST = "cannot change while the job runs; set suspend: true first, change it, then set suspend: false"


@dataclass(frozen=True, slots=True)
class CelRule:
    """A validation rule on the value of a model.

    Attributes:
        rule: CEL expression; true if the value is valid.
        message: What is wrong, and the remedy.
        path: The field of the model to change; empty for the value itself.
    """

    rule: str
    message: str
    path: str = ""

    def as_json(self) -> dict[str, str]:
        made = {"rule": self.rule, "message": self.message}
        return made | {"fieldPath": f".{self.path}"} if self.path else made


def rules_of(model: str) -> tuple[CelRule, ...]:
    """The rules of the model of this name."""
    return _RULES.get(model, ())


def _excludes(one: str, other: str) -> str:
    return f"!(has(self.{one}) && has(self.{other}))"


def _is_default(field: str) -> str:
    """That a field of EnvironmentServers has its default, which the API server may have filled in."""
    match field:
        case "allowEgress":
            return f"!has(self.{field}) || !self.{field}"
        case "resources":
            parts = [f"!has(self.{field}.{part}) || size(self.{field}.{part}) == 0" for part in ("requests", "limits")]
            return f"!has(self.{field}) || (({parts[0]}) && ({parts[1]}))"
        case "env" | "nodeSelector":
            return f"!has(self.{field}) || size(self.{field}) == 0"
    return f"!has(self.{field})"


def _transition_rules() -> Iterator[CelRule]:
    """Transition rules. They belong to the spec, so removing a field does not circumvent them."""
    for field in _SPEC.values():
        if field.traits.change == "Never":
            yield CelRule(_same("", field.alias), "cannot change; create a new job", field.alias)
    for name in ONLY_SUSPENDED:
        # Most are required, or have a default.
        same = [_same("", name) if name in _MAY_BE_ABSENT else f"self.{name} == oldSelf.{name}"]
        if name == "environments":
            same.append(_same_order("environments", "name"))
        if name == "services":
            same.append(f"(!has(self.services) || {_same_order('services', 'name')})")
        if name == "dataset":
            same.append(f"(!has(self.dataset.sources) || {_same_order('dataset.sources', 'name')})")
        yield CelRule(f"oldSelf.suspend || ({' && '.join(same)})", _SUSPEND_FIRST, name)
    for part, found in _PARTS.items():
        keyed = dict(_keyed(f"{part}."))
        for field in found:
            path = f"{part}.{field.alias}"
            if field.traits.change != "Suspended":
                continue
            same = [_same(f"{part}.", field.alias) if path not in _FREE else _same_free(part, field.alias)]
            if path in keyed:
                same.append(f"(!has(self.{path}) || {_same_order(path, keyed[path])})")
            yield CelRule(f"oldSelf.suspend || ({' && '.join(same)})", _SUSPEND_FIRST, path)


def _same(parent: str, name: str) -> str:
    """CEL for an unchanged field; comparing optionals would exceed the API server's cost limit."""
    new, old = f"self.{parent}{name}", f"oldSelf.{parent}{name}"
    return f"has({new}) == has({old}) && (!has({new}) || {new} == {old})"


def _same_free(parent: str, name: str) -> str:
    """CEL for an unchanged field whose values have no types.

    CEL refuses to name such a field, although it compares it as a part of what it is in: dyn() leaves its type to the
    evaluation. What has no type counts as endless where costs are estimated, and a list with one item as short.
    """
    new, old = f"dyn(self.{parent}).{name}", f"dyn(oldSelf.{parent}).{name}"
    return f"has({new}) == has({old}) && (!has({new}) || [{new}] == [{old}])"


def _same_order(path: str, key: str) -> str:
    """CEL for an unchanged order of a keyed list: such lists compare equal in any order, but rows depend on it."""
    return f"self.{path}.map(item, item.{key}) == oldSelf.{path}.map(item, item.{key})"


def _keyed(parent: str) -> Iterator[tuple[str, str]]:
    for info in PodOptions.model_fields.values():
        if isinstance(info.json_schema_extra, dict):
            keys = info.json_schema_extra["x-kubernetes-list-map-keys"]
            assert isinstance(keys, list)
            yield f"{parent}{info.alias}", str(keys[0])


_RULES: Final[dict[str, tuple[CelRule, ...]]] = {
    RolloutJob.__name__: (
        CelRule(
            f"self.metadata.name.size() <= {MAX_NAME_LENGTH} && self.metadata.name.matches('{JOB_NAME_PATTERN}')",
            f"metadata.name must be at most {MAX_NAME_LENGTH} lowercase letters, digits and dashes, beginning with a "
            "letter and ending with a letter or digit: the names of its pods and Services begin with it",
        ),
        # A rule of the whole object, because the status knows what Auto has become. KubeRay takes such a change of a
        # RayService for none: it would neither change the number of pods nor the limits of Ray's autoscaler.
        CelRule(
            "oldSelf.spec.suspend || !has(self.status) || !has(self.status.generation) || "
            "!has(self.status.generation.backend) || self.status.generation.backend != 'KubeRay' || "
            f"({' && '.join(_same('spec.generation.', name) for name in AT_ANY_TIME['generation'])})",
            "the number of replicas cannot change while the job runs with backend KubeRay, which does not pass it on "
            "to a running cluster; set suspend: true first, change it, then set suspend: false",
            "spec.generation",
        ),
    ),
    RolloutJobSpec.__name__: (
        *_transition_rules(),
        CelRule(
            "!self.rollout.groups.dropEqualRewards || "
            "self.environments.all(item, (has(item.repeats) ? item.repeats : self.dataset.repeats) > 1)",
            "the groups of an environment have one sample each, so all their rewards are equal; raise its repeats or "
            "dataset.repeats, or remove dropEqualRewards",
            "rollout.groups.dropEqualRewards",
        ),
        CelRule(
            "self.rollout.scheduling != 'Lockstep' || !self.environments.exists(item, has(item.agent))",
            "agents take their turns by themselves; set scheduling: Concurrent",
            "rollout.scheduling",
        ),
        CelRule(
            "!has(self.generation.external) || self.generation.external.api != 'OpenAI' || "
            "!self.environments.exists(item, has(item.agent) && !has(item.agent.nemoGym))",
            "agents need KubeRoll's own server, whose sessions record their calls; set api: KubeRoll",
            "generation.external.api",
        ),
        CelRule(
            "!has(self.workers.shards) || self.workers.shards <= self.workers.replicas || "
            "(!has(self.rollout.onPolicy) && has(self.dataset.epochs))",
            "with rollout.onPolicy or dataset.epochs: null every shard needs a worker at all times; remove it",
            "workers.shards",
        ),
        CelRule(
            "!has(self.rollout.onPolicy) || !has(self.rollout.groups.wanted)",
            "the trainer of a run with rollout.onPolicy decides when it has enough, with Rollouts.stop(); remove one "
            "of the two",
            "rollout.groups.wanted",
        ),
        CelRule(
            "!has(self.rollout.onPolicy) || !has(self.rollout.onPolicy.maxLag) || !has(self.generation.external) || "
            "self.generation.external.api != 'OpenAI'",
            "OpenAI endpoints do not name the weights that sampled a token; set api: KubeRoll, or remove maxLag",
            "generation.external.api",
        ),
        CelRule(
            "!has(self.rollout.onPolicy) || !has(self.rollout.onPolicy.maxLag) || !has(self.weights) || "
            f"self.weights.version.matches('^({WHOLE_NUMBER})$')",
            "with rollout.onPolicy.maxLag versions are whole numbers that grow",
            "weights.version",
        ),
        CelRule(
            "!has(self.weights) || self.generation.backend != 'External'",
            "is not for backend External, whose weights are managed externally; remove it",
            "weights",
        ),
        CelRule(
            "self.environments.all(item, !has(item.access.services) || item.access.services.all(name, "
            "has(self.services) && self.services.exists(service, service.name == name)))",
            "each of access.services must be the name of one of the job's services",
            "environments",
        ),
        CelRule(
            "!has(self.dataset.source) || "
            "!has(self.dataset.source.generator) || !has(self.dataset.source.generator.environments) || "
            "self.dataset.source.generator.environments.all(name, self.environments.exists(item, item.name == name))",
            "each must be the name of an environment of this job",
            "dataset.source.generator.environments",
        ),
        CelRule(
            "!has(self.dataset.sources) || self.dataset.sources.all(part, "
            "!has(part.environment) || self.environments.exists(item, item.name == part.environment))",
            "the environment of each must be one of this job's",
            "dataset.sources",
        ),
    ),
    Generation.__name__: (
        CelRule(_excludes("replicas", "autoscaling"), "excludes autoscaling; remove one of the two", "replicas"),
        CelRule(
            "self.backend != 'External' || has(self.external)",
            "External needs generation.external.url, the endpoint to use",
            "backend",
        ),
        CelRule(
            "self.backend == 'External' || !has(self.external)",
            "is only for backend External; set backend: External, or remove it",
            "external",
        ),
        CelRule(
            "self.engine == 'Simulated' || !has(self.simulated)",
            "is only for engine Simulated; set engine: Simulated, or remove it",
            "simulated",
        ),
        CelRule(
            "self.backend != 'External' || !has(self.toolCallParser)",
            "is for engines of the job; an external policy's responses are searched for plain tags: remove it",
            "toolCallParser",
        ),
        CelRule(
            "self.backend != 'External' || !has(self.reasoningParser)",
            "is for engines of the job, not for an external policy: remove it",
            "reasoningParser",
        ),
        CelRule(
            "self.backend != 'External' || !has(self.access) || size(self.access) == 0",
            "is for a policy in pods of the job; who reaches an external one is said where it is run: remove it",
            "access",
        ),
    ),
    ModelSource.__name__: (
        CelRule(
            "!has(self.chatTemplate) || self.chatTemplate.contains('{{') || self.chatTemplate.contains('{%')",
            NO_TEMPLATE,
            "chatTemplate",
        ),
    ),
    PolicyAccess.__name__: (
        CelRule(
            "has(self.podSelector) || has(self.namespaceSelector)",
            "set podSelector, namespaceSelector or both: without one it is not said whose access this is",
        ),
    ),
    LabelRequirement.__name__: (
        CelRule(
            "!(self.operator in ['In', 'NotIn']) || (has(self.values) && size(self.values) > 0)",
            "In and NotIn need at least one value",
            "values",
        ),
        CelRule(
            "self.operator in ['In', 'NotIn'] || !has(self.values) || size(self.values) == 0",
            "Exists and DoesNotExist have no values; remove them, or use In or NotIn",
            "values",
        ),
    ),
    Sampling.__name__: (
        CelRule(
            "!has(self.minTokens) || self.minTokens <= self.maxTokens",
            "must not be more than maxTokens",
            "minTokens",
        ),
    ),
    ModelService.__name__: (
        CelRule(
            "!has(self.gpusPerReplica) || !has(self.resources) || !has(self.resources.limits) || "
            f"!('{GPU}' in self.resources.limits) || "
            f"string(self.resources.limits['{GPU}']) == string(self.gpusPerReplica)",
            f"resources.limits has another number of {GPU}; remove one of the two",
            "gpusPerReplica",
        ),
    ),
    Autoscaling.__name__: (
        CelRule("self.minReplicas <= self.maxReplicas", "must not be more than maxReplicas", "minReplicas"),
    ),
    Agent.__name__: (
        CelRule(
            "[has(self.entrypoint), has(self.command), has(self.nemoGym), has(self.tools)]"
            ".filter(given, given).size() == 1",
            "set one of entrypoint (package.module:function), command, nemoGym and tools",
        ),
        *(
            CelRule(
                f"!has(self.{name}) || has(self.command)",
                "is for command; a class at entrypoint has methods of this name",
                name,
            )
            for name in ("setup", "score")
        ),
    ),
    SandboxNetwork.__name__: (
        CelRule(
            "!has(self.allowedHosts) || self.allowedHosts.size() == 0 || self.mode == 'Allowlist'",
            "is for mode Allowlist; set that, or remove the hosts",
            "allowedHosts",
        ),
        CelRule(
            "self.mode != 'Allowlist' || (has(self.allowedHosts) && self.allowedHosts.size() > 0)",
            "mode Allowlist needs hosts; name some, or set mode: None",
            "allowedHosts",
        ),
    ),
    Environment.__name__: (
        CelRule(
            "[has(self.type), has(self.entrypoint), has(self.agent)].filter(given, given).size() == 1 || "
            "(!has(self.type) && !has(self.entrypoint) && !has(self.agent) && "
            "has(self.remote) && has(self.remote.url))",
            "set one of type (a built-in), entrypoint (package.module:Class) and agent",
        ),
        CelRule(
            "!has(self.agent) || !has(self.agent.nemoGym) || self.isolation == 'Inline'",
            "agent.nemoGym is a request to a server, which needs no process of its own; set isolation: Inline",
            "isolation",
        ),
        CelRule(
            "!has(self.agent) || !has(self.agent.tools) || has(self.sandbox)",
            "works in a sandbox; set one (sandbox: {}), or another agent",
            "agent.tools",
        ),
        CelRule(
            "!has(self.sandbox) || (has(self.agent) && !has(self.agent.nemoGym))",
            "is for an agent that works in it: agent.tools, command or entrypoint",
            "sandbox",
        ),
        CelRule(
            "!has(self.sandbox) || self.isolation == 'Inline'",
            "an agent in a sandbox needs no process of its own; set isolation: Inline",
            "isolation",
        ),
        *(
            CelRule(
                f"!has(self.sandbox) || !has(self.agent) || !has(self.agent.{name})",
                "in a sandbox the task sets up and scores; remove it",
                f"agent.{name}",
            )
            for name in ("setup", "score", "hidden")
        ),
        CelRule(
            "!has(self.remote) || self.isolation == 'Remote'",
            "is only for isolation Remote; set isolation: Remote, or remove it",
            "remote",
        ),
        CelRule(
            "!has(self.remote) || !has(self.remote.url) || !has(self.access) || !has(self.access.policy) || "
            "!self.access.policy",
            "servers at remote.url are run by somebody else, who gets no token of this job; remove it and set "
            "KUBEROLL_POLICY_URL and KUBEROLL_POLICY_TOKEN where the servers are run, or remove remote.url",
            "access.policy",
        ),
    ),
    EnvironmentServers.__name__: (
        CelRule(
            "!has(self.urls) || size(self.urls) == 0 || has(self.url)",
            "further servers need url, the first one; found none",
            "urls",
        ),
        CelRule(
            _excludes("url", "image"),
            "is for servers that the operator runs, and url names others; remove one",
            "image",
        ),
        CelRule("!has(self.apiKeyVariable) || has(self.url)", "is for servers at url; found none", "apiKeyVariable"),
        CelRule(
            _excludes("url", "sandbox"),
            "is for servers that the operator claims, and url names others; remove one",
            "sandbox",
        ),
        *(
            CelRule(f"!has(self.sandbox) || {_is_default(alias)}", OF_THE_TEMPLATE_MESSAGE, alias)
            for alias in map(to_camel, OF_THE_TEMPLATE)
        ),
    ),
    Dataset.__name__: (
        CelRule(
            "has(self.source) != (has(self.sources) && size(self.sources) > 0)",
            "set one of source and sources (a list of several)",
        ),
        CelRule(
            "!has(self.sources) || self.sources.all(part, has(part.weight)) || "
            "self.sources.all(part, !has(part.weight))",
            "give all sources a weight, or none",
            "sources",
        ),
        *(
            CelRule(
                f"!has(self.{name}){empty} || !has(self.sources) || size(self.sources) == 0",
                "is for a single source; with sources it belongs to each of them",
                name,
            )
            for name, empty in (("columns", " || size(self.columns) == 0"), ("promptTemplate", ""))
        ),
    ),
    Groups.__name__: (
        CelRule(
            "!has(self.dropBudget) || self.dropEqualRewards",
            "is the budget of dropEqualRewards; set dropEqualRewards: true, or remove it",
            "dropBudget",
        ),
    ),
    OnPolicy.__name__: (
        CelRule("has(self.maxLag) || has(self.maxAhead)", "set maxLag, maxAhead or both"),
        CelRule(
            "self.onStale != 'Finish' || has(self.maxLag)",
            "Finish is for maxLag, without which nothing is too old; set it, or remove this",
            "onStale",
        ),
    ),
    Rollout.__name__: tuple(
        CelRule(
            f"self.journalTurns || !self.groups.{name}",
            f"groups.{name} needs it: results that wait for their group are stored there; remove one of the two",
            "journalTurns",
        )
        for name in ("atomic", "dropEqualRewards")
    ),
    Tracking.__name__: (CelRule("has(self.wandb) || has(self.mlflow)", "set wandb or mlflow, or both"),),
    Output.__name__: (
        CelRule(
            f"!has(self.uri) || !self.uri.startsWith('pvc:') || self.uri.matches('{PVC_PATTERN}')",
            "write pvc://CLAIM or pvc://CLAIM/path, with the name of a PersistentVolumeClaim and a path without . "
            "and ..",
            "uri",
        ),
    ),
}
