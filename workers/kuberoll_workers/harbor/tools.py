"""The agent that KubeRoll brings: the policy calls tools, and their answers come from the sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import aiohttp

from kuberoll_api.model.agents import ToolsAgent
from kuberoll_workers.environments.agents.chat import chat_client, completion
from kuberoll_workers.environments.agents.episode import AgentEpisode
from kuberoll_workers.harbor.agents import Work
from kuberoll_workers.sandboxes.handle import Sandbox
from kuberoll_workers.sandboxes.shell import Shell, ShellResult

OUTPUT_CHARACTERS: Final = 30_000
"""Characters of an answer that the policy reads: of a longer one its beginning and its end."""

_STATE: Final = "kuberoll.harbor.chat"

_PATH: Final = {"type": "string", "description": "Path of the file."}


def _tool(name: str, description: str, **parameters: Mapping[str, Any]) -> dict[str, Any]:
    required = [key for key, value in parameters.items() if "default" not in value]
    schema = {"type": "object", "properties": parameters, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS: Final = [
    _tool(
        "bash",
        "Run a command in a shell that goes on: its directory and variables stay. Answers with its output.",
        command={"type": "string", "description": "The command."},
    ),
    _tool(
        "view",
        "Show a file with the numbers of its lines.",
        path=_PATH,
        first={"type": "integer", "description": "The first line.", "default": 1},
        last={"type": "integer", "description": "The last line; absent: the file's.", "default": 0},
    ),
    _tool(
        "create",
        "Write a file, in place of one that is there.",
        path=_PATH,
        content={"type": "string", "description": "All that it contains."},
    ),
    _tool(
        "replace",
        "Replace a text in a file, which must be there exactly once.",
        path=_PATH,
        old={"type": "string", "description": "The text, as it is in the file."},
        new={"type": "string", "description": "What comes in its place."},
    ),
    _tool("submit", "End the work: it is done."),
]
"""The tools, in the form of OpenAI's chat API."""


class ToolsLoop:
    """The agent: it asks the policy, does what it calls, and goes on until that calls nothing, or `submit`."""

    def __init__(self, settings: ToolsAgent) -> None:
        self._settings = settings

    async def work(self, work: Work) -> None:
        """See `Agent.work`."""
        episode = work.episode
        chat: list[dict[str, Any]] = episode.state.setdefault(_STATE, [dict(message) for message in episode.messages])
        if work.instruction is not None:
            chat.append({"role": "user", "content": work.instruction})
        shell = Shell(work.sandbox, user=work.user, environment=work.environment, output_characters=OUTPUT_CHARACTERS)
        tools = Tools(work.sandbox, shell, user=work.user, seconds=self._settings.command_seconds)
        try:
            async with chat_client() as http:
                while (message := await _asked(http, episode, chat)) is not None:
                    chat.append(message)
                    calls = message.get("tool_calls") or ()
                    for call in calls:
                        function = call["function"]
                        answer = await tools.call(function["name"], function["arguments"])
                        chat.append({"role": "tool", "tool_call_id": call["id"], "content": answer})
                    if not calls or tools.submitted:
                        return
        finally:
            await shell.close()


class Tools:
    """The tools of one sandbox.

    Attributes:
        submitted: True if `submit` was called.
    """

    def __init__(self, sandbox: Sandbox, shell: Shell, *, user: str | None, seconds: float) -> None:
        self._sandbox = sandbox
        self._shell = shell
        self._user = user
        self._seconds = seconds
        self.submitted = False

    async def call(self, name: str, arguments: str) -> str:
        """Call a tool.

        Args:
            arguments: An object of JSON, as the policy wrote it.

        Returns:
            Its answer, or what is wrong with the call.

        Raises:
            SandboxLost: The sandbox is gone.
        """
        known = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
        if name not in known:
            return f"Error: there is no tool {name!r}; the tools are {', '.join(known)}"
        try:
            given = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return f"Error: the arguments are no JSON: {error}"
        if problem := _problem(given, known[name]):
            return f"Error: {problem}"
        try:
            return _shortened(await getattr(self, f"_{name}")(**given))
        except OSError as error:
            return f"Error: {error.strerror or error}"
        except UnicodeDecodeError:
            return "Error: the file is no text"
        except UnicodeEncodeError:
            # Half of a pair of UTF-16, which JSON can write.
            return "Error: the arguments have characters that no text has"

    async def _bash(self, command: str) -> str:
        return _told(await self._shell.run(command, timeout=self._seconds), self._seconds)

    async def _view(self, path: str, first: int = 1, last: int = 0) -> str:
        lines = (await self._sandbox.read(path, user=self._user)).decode().splitlines()
        shown = range(max(first, 1), min(last, len(lines)) + 1 if last else len(lines) + 1)
        return "\n".join(f"{number:6}\t{lines[number - 1]}" for number in shown) or "(no such lines)"

    async def _create(self, path: str, content: str) -> str:
        await self._sandbox.write(path, content, user=self._user)
        return f"{path} is written"

    async def _replace(self, path: str, old: str, new: str) -> str:
        text = (await self._sandbox.read(path, user=self._user)).decode()
        if (count := text.count(old) if old else 0) != 1:
            return f"Error: the text is in {path} {count} times; it must be there exactly once"
        await self._sandbox.write(path, text.replace(old, new), user=self._user)
        return f"{path} is changed"

    async def _submit(self) -> str:
        self.submitted = True
        return "submitted"


async def _asked(
    http: aiohttp.ClientSession, episode: AgentEpisode, chat: list[dict[str, Any]]
) -> dict[str, Any] | None:
    """The policy's next message; None: its budget of calls or tokens is used up.

    Raises:
        AgentFailed: The policy cannot be asked.
    """
    if (answer := await completion(http, episode, {"messages": chat, "tools": TOOLS})) is None:
        return None
    message: dict[str, Any] = answer["choices"][0]["message"]
    return {key: value for key, value in message.items() if value is not None}


def _problem(given: Any, schema: Mapping[str, Any]) -> str | None:
    """What is wrong with the arguments of a call; None: nothing."""
    if not isinstance(given, dict):
        return "the arguments must be an object"
    properties = schema["properties"]
    if unknown := sorted(given.keys() - properties.keys()):
        return f"unknown: {', '.join(unknown)}"
    if missing := [name for name in schema["required"] if name not in given]:
        return f"missing: {', '.join(missing)}"
    for name, value in given.items():
        kind = int if properties[name]["type"] == "integer" else str
        if not isinstance(value, kind) or isinstance(value, bool):
            return f"{name} must be {'a whole number' if kind is int else 'a text'}"
    return None


def _told(result: ShellResult, seconds: float) -> str:
    said = result.output
    if result.timed_out:
        return f"{said}\n[the command took longer than {seconds:g} s, and was ended with its shell; the next is new]"
    if result.ended:
        return f"{said}\n[the shell ended with exit code {result.exit_code}; the next is new]"
    return said if result.exit_code == 0 else f"{said}\n[exit code {result.exit_code}]"


def _shortened(text: str) -> str:
    if len(text) <= OUTPUT_CHARACTERS + 200:
        return text
    half = OUTPUT_CHARACTERS // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters are left out here]\n{text[-half:]}"
