"""Environments whose actions are calls of tools: Python functions with a schema made from their signature."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from kuberoll_workers.data.plain import repr_of
from kuberoll_workers.data.tool_calls import in_order_of_calls
from kuberoll_workers.data.tools import Tool
from kuberoll_workers.environments.interface import (
    ChatMessage,
    EnvironmentInterface,
    EnvironmentReturn,
    Episode,
    EpisodeStart,
    Metadata,
)

_Function = TypeVar("_Function", bound=Callable[..., Any])

_MARK = "__kuberoll_tool__"
_STATE = "state"
_MAX_ERRORS = 8


class ToolError(Exception):
    """A tool cannot do what was asked; raise it from a tool: the policy gets the message as the tool's answer."""


def tool(function: _Function) -> _Function:
    """Mark a method of a `ToolEnvironment` as a tool.

    Its name, its docstring and its parameters, with their annotations and defaults, become the schema that the policy
    sees; `Annotated[int, pydantic.Field(description=...)]` describes a parameter. A parameter named `state` is not the
    policy's: it is the episode's state, which the method may change in place.
    """
    setattr(function, _MARK, True)
    return function


class Function:
    """A function that the policy may call.

    Attributes:
        name: Its name.
        schema: The tool, in the form of OpenAI's chat API.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """
        Raises:
            TypeError: A parameter has no annotation, or one that has no JSON schema.
        """
        self.name: str = function.__name__
        self._function = function
        hints = typing.get_type_hints(function, include_extras=True)
        fields: dict[str, Any] = {}
        signature = inspect.signature(function)
        for parameter in signature.parameters.values():
            if parameter.name == _STATE:
                continue
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise TypeError(f"tool {self.name}: {parameter} cannot be called by name")
            if parameter.name not in hints:
                raise TypeError(f"tool {self.name}: the parameter {parameter.name} has no annotation")
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (hints[parameter.name], default)
        self._takes_state = _STATE in signature.parameters
        self._arguments: type[BaseModel] = create_model(
            self.name, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=False), **fields
        )
        parameters = _without_titles(self._arguments.model_json_schema())
        parameters.pop("additionalProperties", None)
        description = inspect.getdoc(function)
        self.schema: Tool = {
            "type": "function",
            "function": {
                "name": self.name,
                **({} if not description else {"description": description}),
                "parameters": parameters,
            },
        }

    def __call__(self, arguments: Mapping[str, Any], state: dict[str, Any]) -> str:
        """Call the function.

        Returns:
            Its answer: a text, or other values as JSON.

        Raises:
            ToolError: The arguments do not fit, or the function raised it.
        """
        try:
            given = self._arguments.model_validate(dict(arguments))
        except ValidationError as error:
            raise ToolError(_mistakes(error)) from error
        values = {name: getattr(given, name) for name in type(given).model_fields}
        answer = self._function(**values, **({_STATE: state} if self._takes_state else {}))
        return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


class ToolEnvironment(EnvironmentInterface):
    """Environment whose methods marked with `tool` are called by the policy.

    A turn of one or more calls is answered with one message for each; a call that cannot be read, names no tool, or has
    wrong arguments is answered with what is wrong, so that the policy can do better. A response without a call is the
    final answer: it is given to `score`, and ends the episode. The state of an episode is its `metadata`.

    Attributes:
        functions: The tools, by name.
    """

    declares_tools: ClassVar[bool] = True
    row_metadata: ClassVar[Mapping[str, str]] = {}

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.config = dict(config or {})
        self.functions: dict[str, Function] = {}
        for name in _marked(type(self)):
            self.functions[name] = Function(getattr(self, name))
        if not self.functions:
            raise TypeError(f"{type(self).__name__} has no tools: mark its methods with @tool")

    def score(self, messages: Sequence[ChatMessage], state: dict[str, Any]) -> float:
        """Score an episode that has ended.

        Args:
            messages: Its chat log; the last message is the policy's final answer, or the one whose calls ended it.
            state: Its state, which may be changed in place.
        """
        raise NotImplementedError(f"{type(self).__name__}.score: return the reward of an episode")

    def ended(self, state: dict[str, Any]) -> bool:  # noqa: ARG002 - for subclasses
        """True if the calls of a turn have ended the episode."""
        return False

    def reset(self, episodes: list[Episode]) -> Sequence[EpisodeStart | None]:
        """Declare the tools."""
        tools = [function.schema for function in self.functions.values()]
        return [EpisodeStart(tools=tools) for _ in episodes]

    def step(self, message_log_batch: list[list[ChatMessage]], metadata: list[Metadata]) -> EnvironmentReturn:
        observations, states, rewards, ends = [], [], [], []
        for log, given in zip(message_log_batch, metadata, strict=True):
            state = copy.deepcopy(given) if given is not None else {}
            answers = answer_calls(log[-1], functools.partial(self._call, state))
            end = not answers or self.ended(state)
            observations.append(answers or {"role": "environment", "content": ""})
            rewards.append(self._scored(log, state) if end else 0.0)
            states.append(state)
            ends.append(end)
        return EnvironmentReturn(observations, states, None, rewards, ends)

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}

    def _scored(self, log: Sequence[ChatMessage], state: dict[str, Any]) -> Any:
        score = self.score(log, state)
        # A text is no number, even if `float` would read it; an array's element is one.
        if not isinstance(score.tolist() if hasattr(score, "tolist") else score, int | float):
            raise TypeError(f"{type(self).__name__}.score returned {repr_of(score)}; it must return a number")
        return score

    def _call(self, state: dict[str, Any], name: str, arguments: Mapping[str, Any]) -> str:
        function = self.functions.get(name)
        if function is None:
            raise ToolError(f"there is no tool {name!r}; the tools are {', '.join(self.functions)}")
        return function(arguments, state)


def answer_calls(message: ChatMessage, call: Callable[[str, Mapping[str, Any]], str]) -> list[dict[str, str]]:
    """Answers to the calls of a response, one message of the role `tool` for each; empty if it calls nothing.

    Args:
        call: Calls a tool with its arguments, and returns its answer; what it says in a `ToolError` is an answer, too.
    """
    answers: list[dict[str, str]] = []
    for one in message.get("tool_calls") or ():
        function = one["function"]
        try:
            content = call(function["name"], json.loads(function["arguments"]))
        except ToolError as error:
            content = f"Error: {error}"
        answers.append({"role": "tool", "tool_call_id": one["id"], "name": function["name"], "content": content})
    answers += map(unreadable_answer, message.get("invalid_tool_calls") or ())
    return in_order_of_calls(message, answers)


def unreadable_answer(call: Mapping[str, Any]) -> dict[str, str]:
    """The answer to a call that cannot be read."""
    return {
        "role": "tool",
        "tool_call_id": call["id"],
        "content": f"Error: this call cannot be read: {call['error']}",
    }


def _marked(kind: type) -> list[str]:
    """Names of the methods that are tools, those of base classes first, in the order of their definition."""
    names = dict.fromkeys(name for base in reversed(kind.__mro__) for name in vars(base))
    return [name for name in names if getattr(getattr(kind, name, None), _MARK, False)]


def _without_titles(schema: Any) -> Any:
    """A schema without the titles that pydantic makes of names: they would be in every prompt."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key != "title" or not isinstance(value, str)}
    return {key: _without_titles(value) for key, value in kept.items()}


def _mistakes(error: ValidationError) -> str:
    mistakes = error.errors(include_url=False, include_context=False, include_input=False)
    named = [f"{'.'.join(map(str, mistake['loc'])) or 'the arguments'}: {mistake['msg']}" for mistake in mistakes]
    more = f"; and {len(named) - _MAX_ERRORS} more" if len(named) > _MAX_ERRORS else ""
    return f"the arguments do not fit: {'; '.join(named[:_MAX_ERRORS])}{more}"
