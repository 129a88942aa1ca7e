"""mini-swe-agent, outside of the sandbox in which its commands run, with the job's policy as its model.

It is synchronous: it runs in a thread of its own. All that it waits for, commands and responses, are coroutines of the
event loop, which end at once when the trajectory does.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, TypeVar

import aiohttp
from pydantic import BaseModel, Field, JsonValue

from kuberoll_workers.environments.agents.chat import chat_client, completion
from kuberoll_workers.environments.agents.episode import AgentEpisode
from kuberoll_workers.environments.builtin.config import EnvironmentConfig, parse_config
from kuberoll_workers.environments.libraries import Library
from kuberoll_workers.environments.registry import UnusableEnvironment
from kuberoll_workers.sandboxes.errors import CommandNotStarted
from kuberoll_workers.sandboxes.handle import Completed, Sandbox

_Result = TypeVar("_Result")

_SHELLS: Final = (("bash", "-c"), ("/bin/sh", "-c"))
_PATIENCE: Final = 10.0
_UNAME: Final = "for field in s n r v m; do uname -$field; done"
_UNAME_FIELDS: Final = ("system", "node", "release", "version", "machine")
_SUBMITTED: Final = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

# Arguments of litellm that are no fields of a request.
_NO_FIELDS: Final = frozenset({"drop_params", "max_retries", "num_retries", "timeout"})
# Where the policy is, and who asks it, is the job's.
_ADDRESS: Final = frozenset({"api_base", "api_key", "base_url", "custom_llm_provider", "model"})


class CommandsConfig(EnvironmentConfig):
    """How commands run: mini-swe-agent's section `environment`."""

    cwd: str | None = Field(
        default=None, max_length=4096, description="Working directory of each command. Default: the sandbox's."
    )
    env: dict[str, str] = Field(default_factory=dict, description="Variables in addition to the settings'.")
    timeout: float | None = Field(
        default=None, gt=0, le=86_400, description="Time limit of a command in seconds. Default: 30."
    )
    interpreter: list[str] | None = Field(
        default=None, min_length=1, max_length=64, description="What a command is an argument of. Default: bash -c."
    )


class MiniSweAgentConfig(EnvironmentConfig):
    """mini-swe-agent, as its own files of settings describe it."""

    settings: str = Field(
        default="mini",
        min_length=1,
        max_length=4096,
        description="Its settings: a name that it brings, such as mini or swebench, or a file.",
    )
    agent: dict[str, JsonValue] = Field(
        default_factory=dict, description="Changes of the section `agent`, such as {step_limit: 50}."
    )
    environment: CommandsConfig = Field(
        default_factory=CommandsConfig, description="Changes of the section `environment`."
    )
    model: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Changes of the section `model`, such as {model_class: litellm_textbased}: commands in blocks of "
        "text, without tools.",
    )


class Work(Protocol):
    """What `episode.state["work"]` says."""

    @property
    def instruction(self) -> str | None: ...
    @property
    def user(self) -> str | None: ...
    @property
    def environment(self) -> Mapping[str, str]: ...


class MiniSweAgent:
    """The agent of a job: `agent: {entrypoint: "kuberoll_workers.adapters.mini_swe_agent:MiniSweAgent"}`.

    Its own limits end the trajectory, whose work is then scored.
    """

    library: ClassVar[Library] = Library("minisweagent", extra="mini-swe-agent", distribution="mini-swe-agent")

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        """Check a job's config, before an engine is started.

        Raises:
            UnusableEnvironment: mini-swe-agent is not installed, or refuses it.
        """
        _Settings.of(cls.library, config).check()

    async def run(self, episode: AgentEpisode) -> None:
        """Work on the episode's task until it is submitted, or one of the agent's limits is reached.

        Raises:
            SandboxLost: The sandbox is gone.
            AgentFailed: The policy cannot be asked.
        """
        sandbox: Sandbox | None = episode.state.get("sandbox")
        if sandbox is None:
            raise UnusableEnvironment("mini-swe-agent runs its commands in a sandbox: set environments[].sandbox")
        work: Work = episode.state["work"]
        settings = _Settings.of(self.library, episode.config)
        bridge = Bridge()
        environment = await SandboxEnvironment.of(
            sandbox, bridge, user=work.user, variables=work.environment, config=settings.environment
        )
        async with chat_client() as http:
            model = settings.model(episode.model)
            _ask(model, bridge, http, episode)
            agent = settings.agent(model, environment)
            task = work.instruction if work.instruction is not None else _text(episode.messages)
            await bridge.thread(lambda: agent.run(task))


class Bridge:
    """Coroutines of an event loop, for a thread that waits for them; until it ends, and each of them with it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended = False

    async def thread(self, function: Callable[[], _Result]) -> _Result:
        """Call a function in a thread.

        If the caller is cancelled, so is what the thread waits for. It is not waited for itself, as it can do nothing
        any more: at its next `wait` it ends.
        """
        outcome: asyncio.Future[_Result] = self._loop.create_future()

        def tell(set_: Callable[[Any], None], value: Any) -> None:
            if not outcome.done():
                set_(value)

        def call() -> None:
            told: tuple[Callable[[Any], None], Any]
            try:
                told = outcome.set_result, function()
            except BaseException as error:
                told = outcome.set_exception, error
            # A loop that is closed has nobody who waits.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(tell, *told)

        # A daemon: should it compute for ever, the worker ends nevertheless.
        threading.Thread(target=call, name="mini-swe-agent", daemon=True).start()
        try:
            return await outcome
        finally:
            await self._end()

    def wait(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine on the loop, from the thread.

        Raises:
            ThreadEnded: Nobody waits for the thread any more.
        """
        return asyncio.run_coroutine_threadsafe(self._run(coroutine), self._loop).result()

    async def _run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        if self._ended:
            coroutine.close()
            raise ThreadEnded
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await coroutine
        except asyncio.CancelledError:
            raise ThreadEnded from None
        finally:
            self._tasks.discard(task)

    async def _end(self) -> None:
        self._ended = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


class ThreadEnded(BaseException):
    """The thread is to end: no `except Exception` of a library keeps it from that."""


class SandboxSettings(BaseModel):
    """mini-swe-agent's section `environment`, of which templates may use the fields; it ignores further ones."""

    cwd: str = ""
    env: dict[str, str] = {}
    timeout: float = 30
    interpreter: list[str] = []


class SandboxEnvironment:
    """A sandbox as an environment of mini-swe-agent: its `minisweagent.Environment`."""

    def __init__(
        self, sandbox: Sandbox, bridge: Bridge, *, user: str | None, config: SandboxSettings, uname: Mapping[str, str]
    ) -> None:
        """
        Args:
            uname: What the sandbox says of itself, by the names of `platform.uname`.
        """
        self.config = config
        self._sandbox = sandbox
        self._bridge = bridge
        self._user = user
        self._uname = dict(uname)

    @classmethod
    async def of(
        cls,
        sandbox: Sandbox,
        bridge: Bridge,
        *,
        user: str | None,
        variables: Mapping[str, str],
        config: SandboxSettings,
    ) -> SandboxEnvironment:
        """The environment of a sandbox, with what the config leaves to it.

        Raises:
            CommandNotStarted: It has no shell.
        """
        found = config.model_copy(
            update={"cwd": config.cwd or await sandbox.workdir(), "env": {**variables, **config.env}}
        )
        interpreter, said = await _shell(sandbox, [config.interpreter] if config.interpreter else _SHELLS, user)
        found.interpreter = interpreter
        lines = said.splitlines()
        uname = dict(zip(_UNAME_FIELDS, lines if len(lines) == len(_UNAME_FIELDS) else [""] * 5, strict=True))
        return cls(sandbox, bridge, user=user, config=found, uname=uname)

    def execute(self, action: Mapping[str, Any], cwd: str = "", *, timeout: float | None = None) -> dict[str, Any]:
        """Run a command; what it writes, and how it ends.

        Raises:
            Submitted: Its output says that the task is done.
            SandboxLost: The sandbox is gone.
        """
        seconds = timeout or self.config.timeout
        output = self._bridge.wait(self._executed(action.get("command", ""), cwd or self.config.cwd, seconds))
        first, _, rest = output["output"].lstrip().partition("\n")
        if output["returncode"] == 0 and first.strip() == _SUBMITTED:
            from minisweagent.exceptions import Submitted

            end = {"exit_status": "Submitted", "submission": rest}
            raise Submitted({"role": "exit", "content": rest, "extra": end})
        return output

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """What its templates may use: the config, and what the sandbox says of itself."""
        return {**self.config.model_dump(), **self._uname, **kwargs}

    def serialize(self) -> dict[str, Any]:
        """What it says of itself in files of trajectories."""
        kind = f"{type(self).__module__}.{type(self).__name__}"
        config = {"environment": self.config.model_dump(mode="json"), "environment_type": kind}
        return {"info": {"config": config}}

    async def _executed(self, command: Any, cwd: str, seconds: float) -> dict[str, Any]:
        if not isinstance(command, str):
            return _output("", -1, "the command must be a text")
        try:
            done = await self._sandbox.exec(
                [*self.config.interpreter, command],
                timeout=seconds,
                user=self._user,
                workdir=cwd,
                environment=self.config.env,
                merged=True,
            )
        except CommandNotStarted as error:
            # Nothing but what the policy has done or written keeps a command from starting now.
            return _output("", -1, str(error))
        if done.timed_out:
            return _output(done.text, -1, f"the command took longer than {seconds:g} s, and was killed")
        return _output(done.text, _return_code(done), "")


class _Settings:
    """mini-swe-agent's settings, with the job's changes.

    Attributes:
        environment: The section of that name.
    """

    def __init__(self, config: MiniSweAgentConfig, sections: Mapping[str, Any]) -> None:
        self._config = config
        self._agent: dict[str, Any] = sections.get("agent", {})
        self._model: dict[str, Any] = sections.get("model", {})
        self.environment = SandboxSettings(**sections.get("environment", {}))

    @classmethod
    def of(cls, library: Library, given: Mapping[str, Any]) -> _Settings:
        """The settings of an environment's config.

        Raises:
            UnusableEnvironment: mini-swe-agent is not installed, or has no such settings.
        """
        config = parse_config(MiniSweAgentConfig, given)
        # Without a banner, without asking the network for prices, and without the settings of whoever runs this.
        for name, value in (
            ("MSWEA_SILENT_STARTUP", "1"),
            ("MSWEA_GLOBAL_CONFIG_DIR", str(Path(__file__).parent)),
            ("LITELLM_LOCAL_MODEL_COST_MAP", "True"),
        ):
            os.environ.setdefault(name, value)
        merge = library.module("utils.serialize").recursive_merge
        try:
            base = library.module("config").get_config_from_spec(config.settings)
        except (OSError, ValueError) as error:
            raise UnusableEnvironment(f"config.settings: {error}") from error
        changes = {
            "agent": config.agent,
            "environment": config.environment.model_dump(exclude_none=True),
            "model": config.model,
        }
        try:
            return cls(config, merge(base, changes))
        except (TypeError, ValueError, AttributeError) as error:
            raise UnusableEnvironment(f"config.settings: {config.settings} has no valid sections: {error}") from error

    def check(self) -> None:
        """Make an agent of them.

        Raises:
            UnusableEnvironment: One cannot be made.
        """
        model = self.model("policy")
        agent = self.agent(model, None)
        for section, made, more in (("agent", agent, {"agent_class"}), ("model", model, {"model_class"})):
            known = {*type(made.config).model_fields, *more}
            if unknown := sorted(getattr(self._config, section).keys() - known):
                raise UnusableEnvironment(
                    f"config.{section}: unknown: {', '.join(unknown)}; allowed are {', '.join(sorted(known))}"
                )
        if taken := sorted(_ADDRESS & model.config.model_kwargs.keys()):
            raise UnusableEnvironment(
                f"config.model.model_kwargs: {', '.join(taken)}: the model is the job's policy; leave that out"
            )

    def model(self, name: str) -> Any:
        """A model.

        Raises:
            UnusableEnvironment: It cannot be made, or speaks another API than OpenAI's of chats.
        """
        from minisweagent.models import get_model_class
        from minisweagent.models.litellm_model import LitellmModel
        from minisweagent.models.litellm_response_model import LitellmResponseModel

        fields = copy.deepcopy(self._model)
        try:
            kind = get_model_class(name, fields.pop("model_class", "litellm"))
        except ValueError as error:
            raise UnusableEnvironment(f"config.model.model_class: {error}") from error
        if not issubclass(kind, LitellmModel) or issubclass(kind, LitellmResponseModel):
            raise UnusableEnvironment(
                f"config.model.model_class: {kind.__name__} does not ask by OpenAI's chat API; take litellm, "
                "litellm_textbased, or a class of yours that is derived from one of theirs"
            )
        # A policy has no price; whoever registers one has the agent's cost_limit.
        return _made("model", kind, {"cost_tracking": "ignore_errors", **fields, "model_name": name})

    def agent(self, model: Any, environment: SandboxEnvironment | None) -> Any:
        """An agent.

        Raises:
            UnusableEnvironment: It cannot be made.
        """
        from minisweagent.agents import get_agent_class

        fields = copy.deepcopy(self._agent)
        try:
            kind = get_agent_class(fields.pop("agent_class", "default"))
        except ValueError as error:
            raise UnusableEnvironment(f"config.agent.agent_class: {error}") from error
        return _made("agent", kind, fields, model, environment)


def _made(section: str, kind: Callable[..., Any], fields: Mapping[str, Any], *arguments: Any) -> Any:
    try:
        return kind(*arguments, **fields)
    except Exception as error:
        raise UnusableEnvironment(f"config.{section}: {type(error).__name__}: {error}") from error


def _ask(model: Any, bridge: Bridge, http: aiohttp.ClientSession, episode: AgentEpisode) -> None:
    """Have a model of mini-swe-agent ask the episode's policy, in place of litellm.

    It keeps what it does with a response. Nothing is asked twice: a session records each response, and a policy that
    does not answer has failed.
    """
    import litellm
    from minisweagent.exceptions import LimitsExceeded
    from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel
    from minisweagent.models.utils.actions_toolcall import BASH_TOOL

    litellm.suppress_debug_info = True
    tools = {} if isinstance(model, LitellmTextbasedModel) else {"tools": [BASH_TOOL]}

    def query(messages: Sequence[Mapping[str, Any]], **given: Any) -> Any:
        fields = {**model.config.model_kwargs, **given}
        extra = fields.pop("extra_body", None) or {}
        body = {
            "messages": [_plain(message) for message in messages],
            **tools,
            **{name: value for name, value in fields.items() if name not in _NO_FIELDS},
            **extra,
        }
        answer = bridge.wait(completion(http, episode, body))
        if answer is None:
            # Of the job: rollout.maxTurns, or what the model can read.
            end = {"exit_status": "LimitsExceeded", "submission": ""}
            raise LimitsExceeded({"role": "exit", "content": "LimitsExceeded", "extra": end})
        return litellm.ModelResponse(**answer)

    model._query = query
    # The end of the thread, too, would be tried again.
    model.abort_exceptions = [BaseException]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without what litellm adds to it."""
    return {name: value for name, value in message.items() if value is not None and name != "provider_specific_fields"}


async def _shell(sandbox: Sandbox, interpreters: Sequence[Sequence[str]], user: str | None) -> tuple[list[str], str]:
    """The first of some interpreters that the sandbox has, and what its `uname` says.

    Raises:
        CommandNotStarted: It has none of them.
    """
    for interpreter in interpreters:
        try:
            done = await sandbox.exec([*interpreter, _UNAME], user=user, timeout=_PATIENCE)
        except CommandNotStarted:
            continue
        return list(interpreter), done.text if done.succeeded else ""
    names = " and no ".join(interpreter[0] for interpreter in interpreters)
    raise CommandNotStarted(f"the sandbox has no {names}: mini-swe-agent's commands are a shell's")


def _output(text: str, code: int, problem: str) -> dict[str, Any]:
    return {"output": text, "returncode": code, "exception_info": problem}


def _return_code(done: Completed) -> int:
    """A command's exit code, as shells say it."""
    return done.exit_code if done.exit_code is not None else 128 + (done.signal or 0)


def _text(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(str(message["content"]) for message in messages if message["role"] == "user")
