"""Agent servers of NeMo Gym, over HTTP: each episode is one request to `/run`."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from kuberoll_api.model.agents import Agent, GymAgents
from kuberoll_workers.adapters.http import (
    CONNECT_SECONDS,
    OVERLOADED,
    Answer,
    ServerError,
    Unreachable,
    get,
    patiently,
    post,
)
from kuberoll_workers.adapters.nemo_gym_aggregates import Results, metrics_of, results_by_agent
from kuberoll_workers.adapters.nemo_gym_results import reported_failure, reward_of
from kuberoll_workers.adapters.nemo_gym_rollouts import GymAnswer, GymRequest
from kuberoll_workers.data.gym_requests import AGENT, agent_ref
from kuberoll_workers.environments.agents.environment import within
from kuberoll_workers.environments.interface import (
    ChatMessage,
    EnvironmentInterface,
    EnvironmentReturn,
    Metadata,
    UnusableRow,
)

_CONFIG: Final = "global_config_dict_yaml"
_AGENTS: Final = "responses_api_agents"
_OK, _NOT_FOUND = 200, 404
# Statuses by which a server asks for patience.


class NemoGymAgents(EnvironmentInterface):
    """Sends each row to its agent server; an episode is one request, which a retry makes again."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """
        Args:
            config: `agent`, as in the job.
        """
        agent = Agent.model_validate(config["agent"])
        assert agent.nemo_gym is not None
        self._timeouts = agent.timeouts
        self._directory = AgentDirectory(agent.nemo_gym)

    async def step(  # type: ignore[override]
        self,
        message_log_batch: list[list[ChatMessage]],  # noqa: ARG002 - the row has them
        metadata: list[Metadata],
    ) -> EnvironmentReturn:
        """Run one episode for each request.

        Args:
            metadata: Requests, see `GymRequest`.

        Returns:
            Its metadata are `GymAnswer`s.

        Raises:
            UnusableRow: There is no such agent, or it refuses the row.
            ServerError: It cannot be reached, or failed.
            EnvironmentFault: It reports a failure, or no reward.
            AgentLate: It took too long.
        """
        requests = [GymRequest.decode(state or {}) for state in metadata]
        answers = await asyncio.gather(*(within(self._run(request), self._timeouts, "run") for request in requests))
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}] * len(answers),
            metadata=[answer.encode() for answer in answers],
            next_stop_strings=None,
            rewards=[reward_of(answer.result, "the result") for answer in answers],
            terminateds=[True] * len(answers),
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Have the agents compute their aggregate metrics of the run, as Gym's own rollout collection does at its end.

        Raises:
            ServerError: One of them cannot be reached, or failed.
        """
        results = results_by_agent(batch["extra_env_info"], batch["task_index"], batch["rollout_index"])
        return batch, asyncio.run(self._metrics(results))

    async def _metrics(self, results: Results) -> dict[str, Any]:
        answers = await asyncio.gather(*(self._aggregate(name, found) for name, found in results.items()))
        return {key: value for metrics in answers for key, value in metrics.items()}

    async def _aggregate(self, name: str, results: list[dict[str, Any]]) -> dict[str, Any]:
        async def ask() -> Answer:
            _, url = await self._directory.agent(name, named=True)
            return await post(f"{url}/aggregate_metrics", {"verify_responses": results}, {})

        answer = await patiently(ask, CONNECT_SECONDS)
        if answer.status != _OK:
            raise answer.error()
        return metrics_of(name, answer.json())

    async def _run(self, request: GymRequest) -> GymAnswer:
        row = request.row

        async def ask() -> GymAnswer:
            name, url = await self._directory.agent(row[AGENT]["name"], named=request.named)
            try:
                # Every episode begins without cookies: an agent server begins a session for each request without one.
                answer = await post(f"{url}/run", row if request.named else {**row, AGENT: agent_ref(name)}, {})
            except Unreachable:
                # When Gym is started again, its servers listen at other ports.
                self._directory.forget()
                raise
            return GymAnswer(agent=name, result=_result(answer))

        answer = await patiently(ask, CONNECT_SECONDS)
        if (failure := reported_failure(answer.result)) is not None:
            raise failure
        return answer


class AgentDirectory:
    """Finds agent servers by the names of their agents."""

    def __init__(self, servers: GymAgents) -> None:
        self._url = servers.url.rstrip("/")
        self._named = {name: url.rstrip("/") for name, url in servers.agents.items()}
        self._found: dict[str, str] | None = None
        self._asked = False
        self._asking = asyncio.Lock()

    async def agent(self, name: str, *, named: bool) -> tuple[str, str]:
        """Name and base URL of the agent for a row.

        Args:
            name: The agent of the row, or the environment's name.
            named: True if the row itself names it.

        Raises:
            UnusableRow: There is no such agent; or it names none, and there are several.
            Unreachable: The head server cannot be reached.
            ServerError: It answers otherwise than NeMo Gym's.
        """
        if name in self._named:
            return name, self._named[name]
        async with self._asking:
            if not self._asked:
                self._found = await self._ask()
                self._asked = True
        return chosen_agent(name, self._found, self._url, named=named)

    def forget(self) -> None:
        """Ask the head server again before the next row."""
        self._asked = False

    async def _ask(self) -> dict[str, str] | None:
        """Base URLs of the agents that the head server knows; None: the server is no head server."""
        answer = await get(f"{self._url}/{_CONFIG}")
        if answer.status == _NOT_FOUND:
            return None
        if answer.status != _OK:
            raise answer.error()
        text = answer.json()
        if not isinstance(text, str):
            raise answer.error()
        return agents_of(text, self._url)


def chosen_agent(name: str, found: Mapping[str, str] | None, url: str, *, named: bool) -> tuple[str, str]:
    """Name and base URL of the agent for a row.

    Args:
        found: The head server's agents; None: `url` is an agent server itself.
        name, named: As in `AgentDirectory.agent`.

    Raises:
        UnusableRow: There is none; the message has the names of those that there are.
    """
    if found is None:
        return name, url
    if name in found:
        return name, found[name]
    known = ", ".join(sorted(found)) or "none"
    if named:
        raise UnusableRow(f"agent_ref.name: found {name!r}; the agents that {url} knows are {known}")
    if len(found) == 1:
        return next(iter(found.items()))
    raise UnusableRow(
        f"agent_ref: the row names no agent, and those that {url} knows are {known}: name one in the row "
        '({"name": …}), or give the environment its name'
    )


def agents_of(config: str, head: str) -> dict[str, str]:
    """Base URLs of the agent servers in a global configuration of NeMo Gym, by name.

    Gym's servers know each other by the addresses that they listen at. One of this machine alone, or of all its
    interfaces, is the head server's for those who see that elsewhere.

    Args:
        config: YAML text.
        head: Base URL of the head server.

    Raises:
        ServerError: It is no configuration of Gym's, or an agent has no address.
    """
    try:
        servers = YAML(typ="safe", pure=True).load(config)
    except YAMLError as error:
        raise ServerError(f"{head}/{_CONFIG} is no YAML: {error}") from error
    if not isinstance(servers, dict):
        raise ServerError(f"{head}/{_CONFIG} is no configuration of NeMo Gym's: it has no servers")
    found = {}
    for name, server in servers.items():
        agents = server.get(_AGENTS) if isinstance(server, dict) else None
        if not isinstance(agents, dict):
            continue
        for settings in agents.values():
            host, port = (settings.get(key) if isinstance(settings, dict) else None for key in ("host", "port"))
            if not isinstance(host, str) or not isinstance(port, int):
                raise ServerError(f"{head}/{_CONFIG}: the agent {name} has no host and port; found {host!r}, {port!r}")
            found[str(name)] = f"http://{_reachable(host, head)}:{port}"
    return found


def _reachable(host: str, head: str) -> str:
    own = urlsplit(head).hostname or ""
    there = own if _is_of_one_machine(host) and not _is_of_one_machine(own) else host
    if there in ("0.0.0.0", "::"):
        there = own
    return f"[{there}]" if ":" in there else there


def _is_of_one_machine(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def _result(answer: Answer) -> dict[str, Any]:
    """
    Raises:
        UnusableRow: The server refuses the request: a further one would be refused, too.
        ServerError: It failed, or its answer is none of `/run`.
    """
    if answer.status == _NOT_FOUND:
        raise UnusableRow(
            f"agent.nemoGym: {answer.url} answered 404: there is no agent server. Its url is that of an agent server, "
            "or of NeMo Gym's head server"
        )
    if 400 <= answer.status < 500 and answer.status not in OVERLOADED:
        raise UnusableRow(str(answer.error()))
    if answer.status != _OK:
        raise answer.error()
    result = answer.json()
    if not isinstance(result, dict):
        raise answer.error()
    return result
