"""The environments, and the resources that their processes may use."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Field, JsonValue, StringConstraints, model_validator

from kuberoll_api.environment_types import AGENT_TYPE, GYM_AGENT_TYPE, SANDBOX_AGENT_TYPE, EnvironmentType
from kuberoll_api.model.agents import Agent
from kuberoll_api.model.contradictions import contradiction
from kuberoll_api.model.pods import PodOptions, Resources
from kuberoll_api.model.sandboxes import Sandbox
from kuberoll_api.model.services import MAX_SERVICES
from kuberoll_api.model.traits import IDENTITY, OPERATION, POD
from kuberoll_api.model.types import (
    ENTRYPOINT_PATTERN,
    VARIABLE_PATTERN,
    AccessPath,
    DnsLabel,
    DnsName,
    JsonObject,
    Model,
    Name,
    Seconds,
    Url,
)

OF_THE_TEMPLATE = (
    "image",
    "resources",
    "env",
    "allow_egress",
    "node_selector",
    "pod_template",
)
"""Fields of `EnvironmentServers` that a SandboxTemplate decides."""
OF_THE_TEMPLATE_MESSAGE = "is decided by the SandboxTemplate of sandbox.warmPool; set it there, and remove it here"


class EnvironmentAccess(Model):
    """What the processes of an environment may use beyond the usual, with isolation Process; and the policy."""

    policy: bool = Field(
        default=False,
        description="Access to the policy's own endpoint: the environment finds its OpenAI-compatible API in the "
        "variables KUBEROLL_POLICY_URL and KUBEROLL_POLICY_TOKEN; the token can only generate. A judge without a url "
        "has it anyway. Servers at remote.url have none of this job.",
    )
    services: list[DnsLabel] = Field(
        default_factory=list,
        max_length=MAX_SERVICES,
        description="Names of services of the job that the environment may use: it finds the OpenAI-compatible API of "
        "the service `grader` in KUBEROLL_SERVICE_GRADER_URL and KUBEROLL_SERVICE_GRADER_TOKEN. Built-in environments "
        "have the one of config.service anyway.",
    )
    variables: list[Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)]] = Field(
        default_factory=list,
        max_length=64,
        description="Environment variables that the processes inherit from the worker.",
    )
    readable_paths: list[AccessPath] = Field(
        default_factory=list,
        max_length=64,
        description="Additional files and directories that the processes may read, e.g. below /tmp or in the "
        "home directory.",
    )
    writable_paths: list[AccessPath] = Field(
        default_factory=list,
        max_length=64,
        description="Files and directories that the processes may change, in addition to their temporary directory.",
    )


class EnvironmentSandboxes(Model):
    """Sandboxes of agent-sandbox, claimed from a warm pool: their template decides everything about the pods."""

    warm_pool: DnsName = Field(
        description="SandboxWarmPool of the job's namespace (extensions.agents.x-k8s.io/v1beta1) to claim from. When "
        "it is empty, agent-sandbox creates sandboxes from the pool's template.",
    )


class EnvironmentServers(PodOptions):
    """Servers of an environment, with isolation Remote: at `url`, in sandboxes, or else pods of the job's own.

    Variables of `env` that access.variables names reach the environment.
    """

    container_name: ClassVar[str] = "environment"

    resources: Annotated[Resources, POD] = Field(
        default_factory=Resources, description="Requests and limits of a server pod."
    )
    url: Annotated[Url | None, OPERATION] = Field(
        default=None,
        description="Base URL of a server that is run elsewhere (`kuberoll env serve`). With http, each address of its "
        "host name is a server. Absent: the operator runs servers, and `kuberoll run` starts one.",
    )
    urls: Annotated[list[Url], OPERATION] = Field(
        default_factory=list, max_length=256, description="Base URLs of further servers of the same environment."
    )
    api_key_variable: Annotated[
        Annotated[str, StringConstraints(pattern=VARIABLE_PATTERN, max_length=256)] | None, OPERATION
    ] = Field(
        default=None,
        description="Environment variable of the workers that holds the token of the servers at url (workers.env, "
        "from a Secret).",
    )
    sandbox: Annotated[EnvironmentSandboxes | None, POD] = Field(
        default=None,
        description="Claim the servers' pods from a warm pool of agent-sandbox. Its template decides image, resources, "
        "RuntimeClass and egress; `kuberoll run` starts a server, as without it.",
    )
    replicas: Annotated[int, POD] = Field(
        default=1, ge=1, le=1024, description="Number of server pods, or of claimed sandboxes."
    )
    allow_egress: Annotated[bool, POD] = Field(
        default=False, description="Let server pods connect to anything; otherwise they reach DNS only."
    )

    @property
    def located(self) -> list[str]:
        """Base URLs of the servers that are run elsewhere."""
        return [url for url in (self.url, *self.urls) if url is not None]

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.urls and self.url is None:
            raise contradiction("further servers need url, the first one; found none", "urls")
        if self.url is not None and self.image is not None:
            raise contradiction("is for servers that the operator runs, and url names others; remove one", "image")
        if self.url is None and self.api_key_variable is not None:
            raise contradiction("is for servers at url; found none", "apiKeyVariable")
        if self.sandbox is not None:
            self._reject_what_the_template_decides()
        return self

    def _reject_what_the_template_decides(self) -> None:
        if self.url is not None:
            raise contradiction("is for servers that the operator claims, and url names others; remove one", "sandbox")
        for name in OF_THE_TEMPLATE:
            field = type(self).model_fields[name]
            if getattr(self, name) != field.get_default(call_default_factory=True):
                raise contradiction(OF_THE_TEMPLATE_MESSAGE, field.alias or name)


SPARE_PROCESSES: Final = 3
"""Further child processes per worker while a step takes unusually long: other trajectories do not wait for one that
hangs."""

_START_SECONDS: Final = 3600.0
"""Maximum duration of a sandbox's start, with the wait for others'."""

_ASKING: Final = ("judge", "judge_pairs", "reward_model")
"""Built-in environments that ask a served model."""


class Environment(Model):
    """An environment, and the dataset rows that it answers (by `task_name`)."""

    name: Annotated[Name, IDENTITY] = Field(
        description="The `task_name` of the dataset rows that this environment answers."
    )
    type: Annotated[EnvironmentType | None, IDENTITY] = Field(
        default=None,
        description="A built-in environment, or an adapter for the environments of the library of this name.",
    )
    entrypoint: Annotated[
        Annotated[str, StringConstraints(pattern=ENTRYPOINT_PATTERN, max_length=512)] | None, IDENTITY
    ] = Field(default=None, description="Your own environment class, `package.module:Class`.")
    agent: Annotated[Agent | None, OPERATION] = Field(
        default=None,
        description="An agent in place of an environment: a function or program with a loop of its own, which calls "
        "the policy in a session that records its trajectory.",
    )
    sandbox: Sandbox | None = Field(
        default=None,
        description="The machine that each trajectory of an agent has. Rows are tasks of Harbor's format; `kuberoll "
        "run` starts machines on this one; in a cluster they are pods, if the chart's sandboxes.enabled is set.",
    )
    config: Annotated[JsonObject, IDENTITY] = Field(
        default_factory=dict,
        description="Argument of the environment's constructor; an agent finds it in its episode.",
    )
    isolation: Annotated[Literal["Inline", "Process", "Remote"], OPERATION] = Field(
        default="Inline",
        description="Inline: a thread of the worker. Process: child processes, killed when a step times out. Remote: "
        "servers of its own, in pods or elsewhere (see remote).",
    )
    remote: Annotated[EnvironmentServers | None, OPERATION] = Field(
        default=None, description="The servers, with isolation Remote."
    )
    processes: Annotated[int, OPERATION] = Field(
        default=1,
        ge=1,
        le=256,
        description="Child processes per worker, with isolation Process; per server, with isolation Remote.",
    )
    access: Annotated[EnvironmentAccess, OPERATION] = Field(
        default_factory=EnvironmentAccess,
        description="Variables, paths and endpoints that the environment may use in addition to the usual ones.",
    )
    max_batch: Annotated[int, OPERATION] = Field(
        default=256, ge=1, le=65536, description="Maximum number of trajectories in one call of step."
    )
    step_timeout_seconds: Annotated[Seconds, OPERATION] = Field(
        default=30.0, description="Maximum duration of one call of step; an agent has agent.timeouts."
    )
    repeats: Annotated[int | None, IDENTITY] = Field(
        default=None, ge=1, le=65536, description="Samples per prompt of this environment; absent: dataset.repeats."
    )

    @property
    def uses_policy(self) -> bool:
        """True if it must be given the policy's own endpoint; servers elsewhere have the settings of who runs them."""
        if self.remote is not None and self.remote.located:
            return False
        named = self.config.get("url") is not None or self.asked_service is not None
        return self.access.policy or (self.type in ("judge", "judge_pairs") and not named)

    @property
    def needs_endpoint(self) -> bool:
        """True if the policy must have an endpoint for it; an engine in the worker's own process has none.

        Agents of NeMo Gym call it, too, at an address of their own configuration.
        """
        return self.uses_policy or self.agent is not None

    @property
    def reaches_policy(self) -> bool:
        """True if its server pods may connect to the policy: the endpoint, and its replicas, as URLs of sessions do."""
        return self.needs_endpoint

    @property
    def call_seconds(self) -> float:
        """Maximum duration of one call of the environment; an agent's is its whole episode."""
        if self.agent is None:
            return self.step_timeout_seconds
        if self.sandbox is not None:
            # Its row, and the sandbox itself, limit each part of it.
            return self.sandbox.total_seconds + _START_SECONDS
        # The phases have limits of their own: this one is for agents that do not let themselves be stopped.
        return self.agent.timeouts.total + 10.0

    @property
    def call_size(self) -> int:
        """Maximum number of trajectories in one call of the environment."""
        return self.max_batch if self.agent is None else 1

    @property
    def call_spares(self) -> int:
        """Maximum number of further processes beside calls that take unusually long; agents take long as a rule."""
        return SPARE_PROCESSES if self.agent is None else 0

    @property
    def own_entrypoint(self) -> str | None:
        """The user's own code: the environment's entrypoint, or the agent's."""
        return self.entrypoint if self.agent is None else self.agent.entrypoint

    @property
    def constructor(self) -> tuple[str | None, str | None, JsonObject]:
        """Type and entrypoint of the class that is created, of which one is None, and its argument."""
        if self.agent is None:
            return self.type, self.entrypoint, self.config
        agent = self.agent.model_dump(mode="json", by_alias=True)
        if self.agent.nemo_gym is not None:
            return GYM_AGENT_TYPE, None, {"agent": agent}
        if self.sandbox is not None:
            sandbox = self.sandbox.model_dump(mode="json", by_alias=True)
            variables: list[JsonValue] = [*self.access.variables]
            return (
                SANDBOX_AGENT_TYPE,
                None,
                {
                    "agent": agent,
                    "config": self.config,
                    "name": self.name,
                    "sandbox": sandbox,
                    "variables": variables,
                },
            )
        return AGENT_TYPE, None, {"agent": agent, "config": self.config, "variables": [*self.access.variables]}

    @property
    def player(self) -> str | None:
        """Name of the plug-in that plays its trajectories; None: the loop plays them turn by turn."""
        if self.agent is None:
            return None
        return "sessions" if self.has_sessions else "nemo_gym"

    @property
    def has_sessions(self) -> bool:
        """True if it is an agent whose trajectories are sessions of the policy."""
        return self.agent is not None and self.agent.nemo_gym is None

    @property
    def is_gym_agent(self) -> bool:
        """True if its rows go to agent servers of NeMo Gym."""
        return self.agent is not None and self.agent.nemo_gym is not None

    @property
    def gym_urls(self) -> list[str]:
        """Base URLs of the servers of NeMo Gym that its rows go to; none if it is another environment."""
        servers = None if self.agent is None else self.agent.nemo_gym
        return [] if servers is None else [servers.url, *servers.agents.values()]

    @property
    def asked_service(self) -> str | None:
        """Name of the service that a built-in environment asks; None if it asks none."""
        service = self.config.get("service")
        return service if self.type in _ASKING and isinstance(service, str) else None

    @property
    def used_services(self) -> list[str]:
        """Names of the services that it must be given."""
        asked = [] if self.asked_service is None else [self.asked_service]
        return list(dict.fromkeys([*asked, *self.access.services]))

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.remote is not None and self.isolation != "Remote":
            raise contradiction("is only for isolation Remote; set isolation: Remote, or remove it", "remote")
        if self.access.policy and self.remote is not None and self.remote.located:
            raise contradiction(
                "servers at remote.url are run by somebody else, who gets no token of this job; remove it and set "
                "KUBEROLL_POLICY_URL and KUBEROLL_POLICY_TOKEN where the servers are run, or remove remote.url",
                "access",
                "policy",
            )
        kinds = [name for name in ("type", "entrypoint", "agent") if getattr(self, name) is not None]
        if not kinds and self.remote is not None and self.remote.url is not None:
            return self
        if len(kinds) != 1:
            found = " and ".join(kinds) or "none"
            raise contradiction(
                f"set one of type (a built-in), entrypoint (package.module:Class) and agent; found {found}"
            )
        if (
            self.isolation == "Inline"
            and self.agent is not None
            and self.agent.hidden is not None
            and self.agent.hidden.paths
        ):
            raise contradiction(
                "nothing is hidden from programs that run as the worker does; set isolation: Process",
                "agent",
                "hidden",
                "paths",
            )
        if self.is_gym_agent and self.isolation != "Inline":
            raise contradiction(
                "agent.nemoGym is a request to a server, which needs no process of its own; set isolation: Inline",
                "isolation",
            )
        self._check_sandbox()
        if self.asked_service is not None and self.config.get("url") is not None:
            raise contradiction("is a server of the job, and config.url names another; remove one", "config", "service")
        return self

    def _check_sandbox(self) -> None:
        if self.sandbox is None:
            if self.agent is not None and self.agent.tools is not None:
                raise contradiction("works in a sandbox; set one (sandbox: {}), or another agent", "agent", "tools")
            return
        if self.agent is None or self.agent.nemo_gym is not None:
            raise contradiction("is for an agent that works in it: agent.tools, command or entrypoint", "sandbox")
        if self.isolation != "Inline":
            raise contradiction("an agent in a sandbox needs no process of its own; set isolation: Inline", "isolation")
        for name in ("setup", "score", "hidden"):
            if getattr(self.agent, name) is not None:
                raise contradiction("in a sandbox the task sets up and scores; remove it", "agent", name)
