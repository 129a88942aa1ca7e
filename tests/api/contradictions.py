"""Jobs whose fields contradict each other: what the model refuses, and an API server with the same words."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

Object = dict[str, Any]

JOB: Object = {
    "apiVersion": "kuberoll.io/v1alpha1",
    "kind": "RolloutJob",
    "metadata": {"name": "job"},
    "spec": {
        "generation": {"model": {"source": "org/model"}},
        "environments": [{"name": "math", "type": "math"}, {"name": "mine", "entrypoint": "a.b:C"}],
        "dataset": {"source": {"uri": "rows.jsonl"}},
    },
}


class Contradiction(NamedTuple):
    """A change of JOB and what is said of it.

    Attributes:
        change: Values by dotted path; None removes.
        says: Part of the API server's message, with the field.
    """

    change: dict[str, Any]
    says: str


def changed(job: Object, change: dict[str, Any]) -> Object:
    """A copy with values put at dotted paths, numbers being indices; None removes what is there."""
    made = copy.deepcopy(job)
    for path, value in change.items():
        inside: Any = made
        *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        for part in parents:
            inside = inside[part] if isinstance(part, int) else inside.setdefault(part, {})
        if value is None:
            inside.pop(last, None)
        else:
            inside[last] = copy.deepcopy(value)
    return made


_SOURCE = "spec.dataset.source"
_GENERATOR = {"spec.dataset.source.uri": None, "spec.dataset.source.generator": {"count": 1, "environments": ["math"]}}
_ONE = "set one of type (a built-in), entrypoint"
_TAKEN = 'spec.{}[1]: Duplicate value: {{"{}":"same"}}'


def _by_expression(expression: Object) -> Object:
    return {"name": "trainer", "podSelector": {"matchExpressions": [expression]}}


_OF_THE_TEMPLATE: dict[str, Any] = {
    "image": "a",
    "resources": {"limits": {"memory": "1Gi"}},
    "env": [{"name": "A", "value": "1"}],
    "allowEgress": True,
    "nodeSelector": {"pool": "a"},
    "podTemplate": {"metadata": {"labels": {"a": "b"}}},
}

REFUSED: dict[str, Contradiction] = {
    "a name that begins with a digit": Contradiction({"metadata.name": "1st"}, "beginning with a letter"),
    "a name with a dot": Contradiction({"metadata.name": "a.b"}, "lowercase letters, digits and dashes"),
    "a name too long": Contradiction({"metadata.name": "a" * 41}, "metadata.name must be at most 40"),
    "onPolicy without a bound": Contradiction(
        {"spec.rollout.onPolicy": {"onStale": "Drop"}}, "set maxLag, maxAhead or both"
    ),
    "a number of groups beside a trainer": Contradiction(
        {"spec.rollout.onPolicy": {"maxAhead": 4}, "spec.rollout.groups": {"wanted": 8}},
        "spec.rollout.groups.wanted: Invalid value: the trainer of a run with rollout.onPolicy decides",
    ),
    "Finish without maxLag": Contradiction(
        {"spec.rollout.onPolicy": {"onStale": "Finish", "maxAhead": 4}},
        "spec.rollout.onPolicy.onStale: Invalid value: Finish is for maxLag",
    ),
    "shards without a worker for a trainer": Contradiction(
        {"spec.rollout.onPolicy": {"maxAhead": 4}, "spec.workers": {"replicas": 2, "shards": 4}},
        "spec.workers.shards: Invalid value: with rollout.onPolicy or dataset.epochs: null every shard needs a worker",
    ),
    "versions of an endpoint that names none": Contradiction(
        {
            "spec.rollout.onPolicy": {"maxLag": 1},
            "spec.generation.backend": "External",
            "spec.generation.external": {"url": "https://a/b", "api": "OpenAI"},
        },
        "spec.generation.external.api: Invalid value: OpenAI endpoints do not name the weights",
    ),
    "versions that do not count": Contradiction(
        {"spec.rollout.onPolicy": {"maxLag": 1}, "spec.weights": {"uri": "s3://a/b", "version": "step-1"}},
        "spec.weights.version: Invalid value: with rollout.onPolicy.maxLag versions are whole numbers",
    ),
    "an agent in lockstep": Contradiction(
        {
            "spec.environments": [{"name": "math", "agent": {"entrypoint": "a:b"}}],
            "spec.rollout.scheduling": "Lockstep",
        },
        "spec.rollout.scheduling: Invalid value: agents take their turns by themselves",
    ),
    "an agent at a server without sessions": Contradiction(
        {
            "spec.environments": [{"name": "math", "agent": {"entrypoint": "a:b"}}],
            "spec.generation.backend": "External",
            "spec.generation.external": {"url": "https://a/b", "api": "OpenAI"},
        },
        "spec.generation.external.api: Invalid value: agents need KubeRoll's own server",
    ),
    "an agent of two kinds": Contradiction(
        {"spec.environments": [{"name": "math", "agent": {"entrypoint": "a:b", "command": ["c"]}}]},
        "set one of entrypoint (package.module:function), command, nemoGym and tools",
    ),
    "an agent of no kind": Contradiction(
        {"spec.environments": [{"name": "math", "agent": {}}]},
        "set one of entrypoint (package.module:function), command, nemoGym and tools",
    ),
    "an agent of NeMo Gym's that is a program, too": Contradiction(
        {"spec.environments": [{"name": "math", "agent": {"nemoGym": {"url": "http://a"}, "command": ["c"]}}]},
        "set one of entrypoint (package.module:function), command, nemoGym and tools",
    ),
    "tools without a sandbox": Contradiction(
        {"spec.environments": [{"name": "math", "agent": {"tools": {}}}]},
        "spec.environments[0].agent.tools: Invalid value: works in a sandbox",
    ),
    "a sandbox without an agent": Contradiction(
        {"spec.environments": [{"name": "math", "type": "math", "sandbox": {}}]},
        "spec.environments[0].sandbox: Invalid value: is for an agent that works in it",
    ),
    "a sandbox of an agent in processes": Contradiction(
        {"spec.environments": [{"name": "math", "agent": {"tools": {}}, "sandbox": {}, "isolation": "Process"}]},
        "spec.environments[0].isolation: Invalid value: an agent in a sandbox needs no process of its own",
    ),
    "an agent in a sandbox that scores itself": Contradiction(
        {"spec.environments": [{"name": "math", "agent": {"command": ["a"], "score": ["b"]}, "sandbox": {}}]},
        "spec.environments[0].agent.score: Invalid value: in a sandbox the task sets up and scores",
    ),
    "hosts of a network without a list": Contradiction(
        {
            "spec.environments": [
                {"name": "math", "agent": {"tools": {}}, "sandbox": {"network": {"mode": "All", "allowedHosts": ["a"]}}}
            ]
        },
        "spec.environments[0].sandbox.network.allowedHosts: Invalid value: is for mode Allowlist",
    ),
    "a list without hosts": Contradiction(
        {
            "spec.environments": [
                {"name": "math", "agent": {"tools": {}}, "sandbox": {"network": {"mode": "Allowlist"}}}
            ]
        },
        "spec.environments[0].sandbox.network.allowedHosts: Invalid value: mode Allowlist needs hosts",
    ),
    "an agent of NeMo Gym's in processes": Contradiction(
        {"spec.environments": [{"name": "math", "agent": {"nemoGym": {"url": "http://a"}}, "isolation": "Process"}]},
        "spec.environments[0].isolation: Invalid value: agent.nemoGym is a request to a server",
    ),
    "an agent that is an environment, too": Contradiction(
        {"spec.environments": [{"name": "math", "type": "math", "agent": {"entrypoint": "a:b"}}]}, _ONE
    ),
    "a score of a function": Contradiction(
        {"spec.environments": [{"name": "math", "agent": {"entrypoint": "a:b", "score": ["c"]}}]},
        "spec.environments[0].agent.score: Invalid value: is for command",
    ),
    "External without its endpoint": Contradiction(
        {"spec.generation.backend": "External"},
        "spec.generation.backend: Invalid value: External needs generation",
    ),
    "access to somebody else's endpoint": Contradiction(
        {
            "spec.generation.backend": "External",
            "spec.generation.external": {"url": "http://a"},
            "spec.generation.access": [{"name": "trainer", "podSelector": {}}],
        },
        "spec.generation.access: Invalid value: is for a policy in pods of the job; who reaches an external",
    ),
    "access of nobody in particular": Contradiction(
        {"spec.generation.access": [{"name": "trainer"}]},
        "spec.generation.access[0]: Invalid value: set podSelector, namespaceSelector or both",
    ),
    "access of nothing": Contradiction(
        {"spec.generation.access": [{"name": "trainer", "podSelector": None, "namespaceSelector": None}]},
        "spec.generation.access[0]: Invalid value: set podSelector, namespaceSelector or both",
    ),
    "access to nothing": Contradiction(
        {"spec.generation.access": [{"name": "trainer", "podSelector": {}, "scopes": []}]},
        "spec.generation.access[0].scopes: Invalid value: 0",
    ),
    "access to everything": Contradiction(
        {"spec.generation.access": [{"name": "trainer", "podSelector": {}, "scopes": ["*"]}]},
        'spec.generation.access[0].scopes[0]: Unsupported value: "*"',
    ),
    "two accesses of one name": Contradiction(
        {"spec.generation.access": [{"name": "same", "podSelector": {}}, {"name": "same", "namespaceSelector": {}}]},
        _TAKEN.format("generation.access", "name"),
    ),
    "a label in no values": Contradiction(
        {"spec.generation.access": [_by_expression({"key": "a", "operator": "In"})]},
        "spec.generation.access[0].podSelector.matchExpressions[0].values: Invalid value: In and NotIn need at least",
    ),
    "a label that is absent with a value": Contradiction(
        {"spec.generation.access": [_by_expression({"key": "a", "operator": "DoesNotExist", "values": ["b"]})]},
        "spec.generation.access[0].podSelector.matchExpressions[0].values: Invalid value: Exists and DoesNotExist have",
    ),
    "the name of a file as chat template": Contradiction(
        {"spec.generation.model.chatTemplate": "template.jinja"},
        "spec.generation.model.chatTemplate: Invalid value: has neither {{ nor {%: write the template itself",
    ),
    "an endpoint without External": Contradiction(
        {"spec.generation.external": {"url": "http://a"}},
        "spec.generation.external: Invalid value: is only for backend External; set backend: External, or remove it",
    ),
    "a tool parser of somebody else's endpoint": Contradiction(
        {
            "spec.generation.backend": "External",
            "spec.generation.external": {"url": "http://a"},
            "spec.generation.toolCallParser": "hermes",
        },
        "spec.generation.toolCallParser: Invalid value: is for engines of the job",
    ),
    "a reasoning parser of somebody else's endpoint": Contradiction(
        {
            "spec.generation.backend": "External",
            "spec.generation.external": {"url": "http://a"},
            "spec.generation.reasoningParser": "qwen3",
        },
        "spec.generation.reasoningParser: Invalid value: is for engines of the job",
    ),
    "weights of somebody else's endpoint": Contradiction(
        {
            "spec.generation.backend": "External",
            "spec.generation.external": {"url": "http://a"},
            "spec.weights": {"uri": "s3://a/b", "version": "1"},
        },
        "spec.weights: Invalid value: is not for backend External, whose weights are managed externally; remove it",
    ),
    "replicas and autoscaling": Contradiction(
        {"spec.generation.replicas": 1, "spec.generation.autoscaling": {"maxReplicas": 2}},
        "spec.generation.replicas: Invalid value: excludes autoscaling; remove one of the two",
    ),
    "autoscaling upside down": Contradiction(
        {"spec.generation.autoscaling": {"minReplicas": 3, "maxReplicas": 2}},
        "spec.generation.autoscaling.minReplicas: Invalid value: must not be more than maxReplicas",
    ),
    "autoscaling above its only bound": Contradiction(
        {"spec.generation.autoscaling": {"minReplicas": 3, "maxReplicas": 1}}, "must not be more than maxReplicas"
    ),
    "more tokens at the least than at the most": Contradiction(
        {"spec.generation.sampling": {"maxTokens": 5, "minTokens": 6}},
        "spec.generation.sampling.minTokens: Invalid value: must not be more than maxTokens",
    ),
    "two forms of a response": Contradiction(
        {"spec.generation.sampling": {"structuredOutputs": {"regex": "a", "choice": ["b"]}}},
        "spec.generation.sampling.structuredOutputs: Too many: 2: must have at most 1",
    ),
    "simulated settings of vLLM": Contradiction(
        {"spec.generation.simulated": {}},
        "spec.generation.simulated: Invalid value: is only for engine Simulated; set engine: Simulated, or remove it",
    ),
    "an environment of both kinds": Contradiction({"spec.environments.0.entrypoint": "a.b:C"}, _ONE),
    "an environment of no kind": Contradiction({"spec.environments.1.entrypoint": None}, _ONE),
    "servers without Remote": Contradiction(
        {"spec.environments.0.remote": {}},
        "spec.environments[0].remote: Invalid value: is only for isolation Remote; set isolation: Remote, or remove it",
    ),
    "servers elsewhere with an image": Contradiction(
        {"spec.environments.0.isolation": "Remote", "spec.environments.0.remote": {"url": "http://a", "image": "b"}},
        "spec.environments[0].remote.image: Invalid value: is for servers that the operator runs",
    ),
    "further servers without a first": Contradiction(
        {"spec.environments.0.isolation": "Remote", "spec.environments.0.remote": {"urls": ["http://a"]}},
        "spec.environments[0].remote.urls: Invalid value: further servers need url",
    ),
    "the policy for servers of others": Contradiction(
        {
            "spec.environments.0.isolation": "Remote",
            "spec.environments.0.remote": {"url": "http://a"},
            "spec.environments.0.access": {"policy": True},
        },
        "spec.environments[0].access.policy: Invalid value: servers at remote.url are run by somebody else",
    ),
    "a token of no server": Contradiction(
        {"spec.environments.0.isolation": "Remote", "spec.environments.0.remote": {"apiKeyVariable": "A"}},
        "spec.environments[0].remote.apiKeyVariable: Invalid value: is for servers at url; found none",
    ),
    "sandboxes and a URL": Contradiction(
        {
            "spec.environments.0.isolation": "Remote",
            "spec.environments.0.remote": {"url": "http://a", "sandbox": {"warmPool": "python"}},
        },
        "spec.environments[0].remote.sandbox: Invalid value: is for servers that the operator claims",
    ),
    **{
        f"sandboxes and {field}": Contradiction(
            {
                "spec.environments.0.isolation": "Remote",
                "spec.environments.0.remote": {"sandbox": {"warmPool": "python"}, field: value},
            },
            f"spec.environments[0].remote.{field}: Invalid value: is decided by the SandboxTemplate",
        )
        for field, value in _OF_THE_TEMPLATE.items()
    },
    "an environment of no kind in pods": Contradiction(
        {
            "spec.environments.1.entrypoint": None,
            "spec.environments.1.isolation": "Remote",
            "spec.environments.1.remote": {"image": "a"},
        },
        _ONE,
    ),
    "two variables of one name in a server": Contradiction(
        {
            "spec.environments.0.isolation": "Remote",
            "spec.environments.0.remote": {"env": [{"name": "same"}, {"name": "same"}]},
        },
        _TAKEN.format("environments[0].remote.env", "name"),
    ),
    "GPUs of a service by two fields": Contradiction(
        {
            "spec.services": [
                {
                    "name": "grader",
                    "model": {"source": "org/grader"},
                    "gpusPerReplica": 2,
                    "resources": {"limits": {"nvidia.com/gpu": "1"}},
                }
            ]
        },
        "spec.services[0].gpusPerReplica: Invalid value: resources.limits has another number of nvidia.com/gpu",
    ),
    "an environment with a service that does not exist": Contradiction(
        {"spec.environments.0.access": {"services": ["grader"]}},
        "spec.environments: Invalid value: each of access.services must be the name of one of the job's services",
    ),
    "two services of one name": Contradiction(
        {"spec.services": [{"name": "same", "model": {"source": "a"}}, {"name": "same", "model": {"source": "b"}}]},
        _TAKEN.format("services", "name"),
    ),
    "a service of no DNS label": Contradiction(
        {"spec.services": [{"name": "Grader", "model": {"source": "a"}}]}, "spec.services[0].name: Invalid value"
    ),
    "two environments of one name": Contradiction(
        {"spec.environments.0.name": "same", "spec.environments.1.name": "same"}, _TAKEN.format("environments", "name")
    ),
    "two sources": Contradiction(
        {f"{_SOURCE}.pvc": {"claimName": "a", "path": "b"}}, f"{_SOURCE}: Too many: 2: must have at most 1"
    ),
    "rows and another source": Contradiction({f"{_SOURCE}.rows": [{"a": 1}]}, f"{_SOURCE}: Too many: 2"),
    "a source and several": Contradiction(
        {"spec.dataset.sources": [{"name": "a", "source": {"uri": "b"}}]},
        "spec.dataset: Invalid value: set one of source and sources",
    ),
    "neither a source nor several": Contradiction(
        {_SOURCE: None}, "spec.dataset: Invalid value: set one of source and sources"
    ),
    "two sources of one name": Contradiction(
        {
            _SOURCE: None,
            "spec.dataset.sources": [
                {"name": "same", "source": {"uri": "a"}},
                {"name": "same", "source": {"uri": "b"}},
            ],
        },
        _TAKEN.format("dataset.sources", "name"),
    ),
    "a weight for some sources": Contradiction(
        {
            _SOURCE: None,
            "spec.dataset.sources": [
                {"name": "a", "source": {"uri": "a"}, "weight": 1},
                {"name": "b", "source": {"uri": "b"}},
            ],
        },
        "spec.dataset.sources: Invalid value: give all sources a weight, or none",
    ),
    "columns of several sources": Contradiction(
        {
            _SOURCE: None,
            "spec.dataset.columns": {"prompt": "question"},
            "spec.dataset.sources": [{"name": "a", "source": {"uri": "a"}}],
        },
        "spec.dataset.columns: Invalid value: is for a single source; with sources it belongs to each of them",
    ),
    "a template of several sources": Contradiction(
        {
            _SOURCE: None,
            "spec.dataset.promptTemplate": {"user": "{question}"},
            "spec.dataset.sources": [{"name": "a", "source": {"uri": "a"}}],
        },
        "spec.dataset.promptTemplate: Invalid value: is for a single source; with sources it belongs to each of them",
    ),
    "a source of an unknown environment": Contradiction(
        {_SOURCE: None, "spec.dataset.sources": [{"name": "a", "source": {"uri": "a"}, "environment": "maths"}]},
        "spec.dataset.sources: Invalid value: the environment of each must be one of this job's",
    ),
    "no source": Contradiction({f"{_SOURCE}.uri": None}, f"{_SOURCE} in body should have at least 1 properties"),
    "rows of an unknown environment": Contradiction(
        _GENERATOR | {f"{_SOURCE}.generator.environments": ["math", "maths"]},
        "spec.dataset.source.generator.environments: Invalid value: each must be the name of an environment",
    ),
    "a budget of nothing": Contradiction(
        {"spec.rollout.groups": {"dropBudget": 1}},
        "spec.rollout.groups.dropBudget: Invalid value: is the budget of dropEqualRewards; set dropEqualRewards: true",
    ),
    "atomic groups without a journal": Contradiction(
        {"spec.rollout": {"journalTurns": False, "groups": {"atomic": True}}},
        "spec.rollout.journalTurns: Invalid value: groups.atomic needs it",
    ),
    "dropped groups without a journal": Contradiction(
        {"spec.dataset.repeats": 2, "spec.rollout": {"journalTurns": False, "groups": {"dropEqualRewards": True}}},
        "spec.rollout.journalTurns: Invalid value: groups.dropEqualRewards needs it",
    ),
    "dropped groups of one": Contradiction(
        {"spec.rollout.groups": {"dropEqualRewards": True}},
        "spec.rollout.groups.dropEqualRewards: Invalid value: the groups of an environment have one sample each",
    ),
    "dropped groups of one in one environment": Contradiction(
        {
            "spec.rollout.groups": {"dropEqualRewards": True},
            "spec.dataset.repeats": 4,
            "spec.environments.1.repeats": 1,
        },
        "the groups of an environment have one sample each",
    ),
    "tracking by nobody": Contradiction(
        {"spec.output.tracking": {"trajectories": True}}, "spec.output.tracking: Invalid value: set wandb or mlflow"
    ),
    "a claim without a name": Contradiction(
        {"spec.output.uri": "pvc://"}, "spec.output.uri: Invalid value: write pvc://"
    ),
    "a claim with one slash": Contradiction({"spec.output.uri": "pvc:/claim"}, "write pvc://CLAIM"),
    "a claim in capitals": Contradiction({"spec.output.uri": "pvc://Claim/a"}, "write pvc://CLAIM"),
    "a path out of the claim": Contradiction({"spec.output.uri": "pvc://claim/a/../../b"}, "a path without . and .."),
    "variables of one name": Contradiction(
        {"spec.workers.env": [{"name": "same", "value": "1"}, {"name": "same", "value": "2"}]},
        _TAKEN.format("workers.env", "name"),
    ),
    "a variable without a name": Contradiction(
        {"spec.workers.env": [{"value": "1"}]}, "spec.workers.env[0].name: Required value"
    ),
    "no quantity": Contradiction(
        {"spec.workers.resources.limits": {"memory": "8 GB"}}, "spec.workers.resources.limits.memory: Invalid value"
    ),
}

ACCEPTED: dict[str, dict[str, Any]] = {
    "nothing but what is required": {},
    "access": {
        "spec.generation.access": [
            {"name": "judge", "podSelector": {"matchLabels": {"app": "judge"}}},
            {"name": "anybody", "podSelector": {}, "namespaceSelector": {}, "scopes": ["read"]},
            {
                "name": "trainer",
                "namespaceSelector": {
                    "matchExpressions": [
                        {"key": "example.org/team", "operator": "In", "values": ["a", ""]},
                        {"key": "frozen", "operator": "DoesNotExist"},
                    ]
                },
                "scopes": ["generate", "weights"],
                "tokenSecret": {"name": "trainer.token", "key": "key.txt"},
            },
        ]
    },
    "access of nobody": {"spec.generation.access": []},
    "servers in pods": {
        "spec.environments.1.isolation": "Remote",
        "spec.environments.1.remote": {"image": "a", "replicas": 2, "nodeSelector": {"a": "b"}, "allowEgress": True},
    },
    "servers in sandboxes": {
        "spec.environments.1.isolation": "Remote",
        "spec.environments.1.remote": {
            "sandbox": {"warmPool": "python"},
            "replicas": 4,
            "allowEgress": False,
            "env": [],
        },
    },
    "servers elsewhere": {
        "spec.environments.1.entrypoint": None,
        "spec.environments.1.isolation": "Remote",
        "spec.environments.1.remote": {"url": "http://a", "urls": ["https://b"], "apiKeyVariable": "KEY"},
    },
    "a service": {
        "spec.services": [
            {
                "name": "grader",
                "model": {"source": "org/grader", "revision": "main"},
                "engineArgs": {"runner": "pooling", "max_model_len": 8192},
                "replicas": 2,
                "gpusPerReplica": 1,
                "resources": {"limits": {"cpu": "4", "nvidia.com/gpu": 1}},
            }
        ],
        "spec.environments.0": {"name": "math", "type": "reward_model", "config": {"service": "grader"}},
        "spec.environments.1.access": {"services": ["grader"]},
    },
    "the longest name": {"metadata.name": "a" + "-" * 38 + "1"},
    "weights": {"spec.weights": {"uri": "s3://bucket/step-100", "version": "step-100"}},
    "several endpoints": {
        "spec.generation.backend": "External",
        "spec.generation.external": {
            "url": "https://a",
            "urls": ["https://b"],
            "api": "OpenAI",
            "apiKeyVariable": "KEY",
        },
    },
    "External": {"spec.generation.backend": "External", "spec.generation.external": {"url": "https://a/b"}},
    "autoscaling": {"spec.generation.autoscaling": {"minReplicas": 2, "maxReplicas": 2}},
    "autoscaling by default from one": {"spec.generation.autoscaling": {"maxReplicas": 1}},
    "replicas": {"spec.generation.replicas": 4},
    "simulated": {"spec.generation.engine": "Simulated", "spec.generation.simulated": {"responses": ["a"]}},
    "rows": {f"{_SOURCE}": {"rows": [{"prompt": "a", "more": {"b": [1, None]}}]}},
    "a generator": _GENERATOR,
    "a generator for all": _GENERATOR | {f"{_SOURCE}.generator.environments": []},
    "a ConfigMap": {_SOURCE: {"configMap": {"name": "a"}}},
    "a hub's dataset": {_SOURCE: {"huggingface": {"name": "a/b"}}},
    "dropped groups": {
        "spec.rollout.groups": {"dropEqualRewards": True, "dropBudget": 3},
        "spec.environments.0.repeats": 2,
        "spec.environments.1.repeats": 2,
    },
    "no journal": {"spec.rollout.journalTurns": False},
    "a trainer": {
        "spec.rollout.onPolicy": {"maxLag": 0, "onStale": "Finish", "maxAhead": 8},
        "spec.weights": {"uri": "s3://a/b", "version": "12"},
        "spec.workers": {"replicas": 2, "shards": 2},
    },
    "a trainer that is behind": {"spec.rollout.onPolicy": {"maxAhead": 8}},
    "tracking": {"spec.output.tracking": {"wandb": {"project": "a", "nemoGymRollouts": True}}},
    "a bucket": {"spec.output.uri": "s3://bucket/run"},
    "a claim": {"spec.output.uri": "pvc://claim"},
    "a path in a claim": {"spec.output.uri": "pvc://claim.a/b/..c/.d/e f/"},
    "the largest seed": {"spec.generation.sampling.seed": 2**63 - 1},
    "quantities": {
        "spec.generation.resources": {
            "limits": {"nvidia.com/gpu": 1, "memory": "16Gi", "cpu": "500m"},
            "requests": {"cpu": ".5", "ephemeral-storage": "1e9"},
        }
    },
    "everything of a pod": {
        "spec.workers": {
            "replicas": 0,
            "shards": 8,
            "retriesPerShard": 0,
            "maxFailedShards": 2,
            "files": {"configMap": {"name": "job-files-0", "items": [{"key": "a.b.py", "path": "a/b.py"}]}},
            "image": "registry/image@sha256:0",
            "env": [
                {"name": "A", "value": ""},
                {"name": "B", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}},
            ],
            "nodeSelector": {"a/b": ""},
            "podTemplate": {
                "metadata": {"labels": {"a": "b"}},
                "spec": {
                    "hostname": "a",
                    "containers": [{"name": "c", "image": "c"}],
                    "volumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "hostPath": {"path": "/b"}}],
                    "tolerations": [{"operator": "Exists"}],
                },
            },
        }
    },
}
