"""Validation of one dataset row, in any of the supported formats."""

from __future__ import annotations

import json
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import orjson
from pydantic import ValidationError
from pydantic.alias_generators import to_camel

from kuberoll_api.model.dataset import PromptTemplate
from kuberoll_api.model.generation import Sampling
from kuberoll_workers.data.plain import bare
from kuberoll_workers.data.response_items import InvalidItem, messages_of_items
from kuberoll_workers.data.tools import InvalidTools, Tool, checked_calls, checked_tools
from kuberoll_workers.data.tracebacks import Traceback
from kuberoll_workers.dataset.columns import ColumnMap, MissingColumn

_SAMPLING_ALIASES = {to_camel(name): name for name in Sampling.model_fields if name != "override"}

# Sampling parameters of a request, in the spelling of OpenAI's APIs and of vLLM.
_PARAMETERS = {
    **{name: name for name in Sampling.model_fields if name not in ("greedy", "override", "stop")},
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
}
_PROMPT_PARAMETERS = {"input", "messages", "instructions", "stop", "tools"}
# Parameters that do not change which tokens a policy samples.
_IDLE_PARAMETERS = {
    "background", "include", "logprobs", "metadata", "model", "parallel_tool_calls", "prompt_cache_key",
    "reasoning", "safety_identifier", "service_tier", "store", "stream", "stream_options", "tool_choice",
    "top_logprobs", "truncation", "user",
}  # fmt: skip
_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})

_TEXT_PARTS = ("text", "input_text", "output_text")

# Gym's numbering of a rollout, which would make the samples of a task different rows.
_ROLLOUT_FIELDS = ("_ng_rollout_index", "_ng_attempt_index", "_ng_rollout_id")
# Fields with a meaning of their own in every form of a row.
_OWN_FIELDS = {"task_name", "task_id", "sampling", "stop_strings", "idx", "metadata", "tools"}
_PROMPT_FIELDS = ("messages", "prompt")
_PLAIN_FIELDS = {*_OWN_FIELDS, *_PROMPT_FIELDS}
# Gym's tools are among the parameters; another field of that name is the data's own.
_GYM_FIELDS = {*_OWN_FIELDS - {"tools"}, "responses_create_params", "agent_ref"}
_BATCH_FIELDS = {*_OWN_FIELDS, "custom_id", "body", "method", "url"}
_AGENT_NAME = "agent_ref.name"
_EXTRA_BODY = "responses_create_params.metadata.extra_body"
_NO_COLUMNS = ColumnMap({})
_NO_NAMES: Mapping[str, str] = {}

_ASSISTANT_LAST = (
    "the last message is the assistant's: as a prompt it would give the answer away. Move it to the field that the "
    "environment reads: jq -c '.metadata.ground_truth = .messages[-1].content | del(.messages[-1])'"
)
_NOT_TOOLS = (
    'A tool is {"type": "function", "function": {"name", "description", "parameters"}}, with a JSON schema as '
    "parameters; a field that has other data can be metadata: dataset.columns: {metadata.tools: tools}"
)


class DatasetError(ValueError):
    """The dataset is invalid; the message names the row and the remedy.

    Attributes:
        traceback: Of the exception that an environment's generator raised; None if it raised none.
    """

    def __init__(self, message: str, traceback: Traceback | None = None) -> None:
        super().__init__(message)
        self.traceback = traceback


class RowPosition(NamedTuple):
    """Position of a row as text: `file:line`, `file[index]`, or its path in the manifest."""

    before: str
    number: int
    after: str = ""

    def __str__(self) -> str:
        return f"{self.before}{self.number}{self.after}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One validated row.

    Attributes:
        place: Position of the row, for errors.
        content: Canonical JSON of the whole row; rows with equal content are one task.
        task_id: The row's own name of its task; rows with the same name are one task. None: the content decides.
        messages: The prompt's chat messages, with text content; none if the environment's `reset` gives them.
        metadata: Initial state of the episode.
        sampling: Overrides of the job's sampling, by snake_case name.
        seed: Base of the samples' seeds, in place of the job's; None if the row has none.
        tools: Tools that the policy may call; None: the row declares none.
        given: JSON of the row with its nulls and the order of its fields, for agent servers of NeMo Gym; None: the row
            goes to none.
    """

    place: RowPosition
    content: bytes
    task_id: str | int | None
    task_name: str
    messages: list[dict[str, Any]]
    metadata: dict[str, Any] | None
    stop_strings: tuple[str, ...] | None
    sampling: dict[str, Any]
    idx: Any
    seed: int | None = None
    tools: list[Tool] | None = None
    given: bytes | None = None

    @property
    def where(self) -> str:
        return str(self.place)


@dataclass(slots=True, kw_only=True)
class _Form:
    """Fields of a row, under the names of the plain format.

    Attributes:
        messages: The prompt; None if the row has none and needs the job's template.
        prompt_name: Name of the prompt's field in the row.
        other_fields: Fields without a meaning of their own.
        source_names: The row's own name of a field, if it differs from the plain format's.
    """

    messages: list[dict[str, Any]] | None
    task_name: Any
    task_id: Any
    metadata: Any
    stop_strings: Any
    sampling: Any
    idx: Any
    prompt_name: str
    other_fields: Mapping[str, Any]
    source_names: dict[str, str]
    tools: Any = None


def parse_row(
    row: Any,
    *,
    place: RowPosition,
    task_names: Sequence[str],
    template: PromptTemplate | None,
    columns: ColumnMap = _NO_COLUMNS,
    default_task: str | None = None,
    gym_agents: Collection[str] = (),
) -> Row:
    """Validate one row.

    A plain row has its prompt in `messages` (chat messages) or `prompt` (text or chat messages), or the job has a
    promptTemplate over the row's fields; `task_name` names its environment (not needed when there is one only);
    `task_id`, `metadata`, `stop_strings`, `sampling`, `tools` and `idx` are optional. Rows of NeMo Gym
    (`responses_create_params`) and of OpenAI's batch API (`custom_id`, `body`) are read as they are. A field that is
    null counts as absent.

    If the job has a template or columns, the fields without a meaning of their own become metadata, because somebody
    else named them; NeMo Gym's always do.

    Args:
        task_names: Names of the job's environments, in their order.
        columns: Names of the row's fields, by those of the plain format.
        default_task: Environment of rows that name none; None: the job's only one.
        gym_agents: Names of the environments that are agent servers of NeMo Gym. If there is only one, rows whose
            `agent_ref` is no environment's name are its.

    Raises:
        DatasetError: The row is invalid; the message names the row and the field.
    """
    where = str(place)
    if not isinstance(row, dict):
        raise DatasetError(f"{where}: found {_kind(row)}; a row is a JSON object")
    row = _plain_request(row, where)
    content = canonical({key: value for key, value in row.items() if key not in _ROLLOUT_FIELDS}, where)
    form = _form(row, where, task_names) if not columns else _mapped_form(row, columns, where, task_names)
    messages = _prompt(form, row, where, template)
    if template is not None or columns:
        form.metadata = _whole_metadata(form.other_fields, form.metadata, where)
    metadata = form.metadata
    if metadata is not None and not isinstance(metadata, dict):
        raise DatasetError(
            f"{where}: {form.source_names.get('metadata', 'metadata')}: found {_kind(metadata)}; it must be an object"
        )
    if metadata is not None and not isinstance(row.get("responses_create_params"), dict):
        # Gym's servers may demand fields that are null.
        metadata = bare(metadata)
    task_id = _task_id(form, where)
    sampling = _sampling(form, where)
    seed = sampling.pop("seed", None)
    task_name = _task_name(form, where, task_names, default_task, gym_agents)
    return Row(
        place=place,
        content=content,
        task_id=task_id,
        task_name=task_name,
        messages=messages,
        metadata=metadata,
        stop_strings=_stop_strings(form.stop_strings, where, form.source_names.get("stop_strings", "stop_strings")),
        sampling=sampling,
        idx=form.idx if form.idx is not None else task_id,
        seed=seed,
        tools=_tools(form, where),
        given=orjson.dumps(row) if task_name in gym_agents else None,
    )


SOURCE_FIELD = "dataset_source"
"""Field of the metadata that names the row's source, if the dataset has several."""


def row_of_source(row: Row, name: str, number: int) -> Row:
    """A row as one of several sources: the source is in its metadata, and its task and `idx` are the source's own.

    Args:
        name: The source's name.
        number: The row's number in the source, the end of `idx` if the row has none.

    Raises:
        DatasetError: The row's metadata has another value in the field for the source.
    """
    metadata = row.metadata or {}
    if metadata.get(SOURCE_FIELD, name) != name:
        raise DatasetError(
            f"{row.where}: metadata.{SOURCE_FIELD}: found {_kind(metadata[SOURCE_FIELD])}; the name of the source, "
            f"{name}, belongs there: give the row's field another name"
        )
    idx = number if row.idx is None else row.idx
    return replace(
        row,
        content=name.encode() + b" " + row.content,
        task_id=None if row.task_id is None else f"{name}/{row.task_id}",
        metadata={**metadata, SOURCE_FIELD: name},
        idx=f"{name}/{idx if isinstance(idx, str) else canonical(idx, row.where).decode()}",
    )


def canonical(value: Any, where: str) -> bytes:
    """JSON that depends only on the meaning of a value: sorted keys, no null fields, 1.0 written as 1.

    File formats differ in these: Parquet has nulls for missing fields, and floats for integers in a column with a
        float.

    Raises:
        DatasetError: JSON cannot represent the value.
    """
    try:
        text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
        # Nulls (NaN is written as null, too) and whole floats are visible in the text; most rows have neither.
        if b"null" in text or b".0" in text:
            return orjson.dumps(bare(value), option=orjson.OPT_SORT_KEYS)
        return text
    except (TypeError, RecursionError) as error:
        raise DatasetError(f"{where}: the row cannot be written as JSON: {error}") from error


def _form(
    row: dict[str, Any], where: str, task_names: Collection[str], source_names: Mapping[str, str] = _NO_NAMES
) -> _Form:
    if row.get("responses_create_params") is not None:
        return _gym_form(row, where, source_names, task_names)
    if row.get("custom_id") is not None and isinstance(row.get("body"), dict):
        return _batch_form(row, where, source_names)
    return _plain_form(row, where, source_names)


def _mapped_form(row: dict[str, Any], columns: ColumnMap, where: str, task_names: Collection[str]) -> _Form:
    """The form of a row whose fields have other names."""
    try:
        mapped = columns.mapped(row)
    except MissingColumn as error:
        raise DatasetError(f"{where}: {error}") from error
    names = columns.names
    prompt = "prompt" if "prompt" in names else "messages" if "messages" in names else None
    if prompt is None:
        form = _form(mapped, where, task_names, names)
    else:
        # The job says which field is the prompt, so no other one is.
        other = mapped.pop("messages" if prompt == "prompt" else "prompt", None)
        form = _plain_form(mapped, where, names)
        if form.messages is None:
            raise DatasetError(f"{where}: {names[prompt]}: found nothing; dataset.columns maps it to {prompt}")
        if other is not None:
            form.other_fields = {**form.other_fields, "messages" if prompt == "prompt" else "prompt": other}
    # The job says what these are, so a field of the same name is not.
    if not columns.metadata.isdisjoint(form.other_fields):
        form.other_fields = _others(form.other_fields, columns.metadata)
    return form


def _plain_form(row: dict[str, Any], where: str, source_names: Mapping[str, str] = _NO_NAMES) -> _Form:
    messages, prompt = row.get("messages"), row.get("prompt")
    if messages is not None and prompt is not None:
        raise DatasetError(f"{where}: messages and prompt exclude each other: keep one")
    if isinstance(prompt, str):
        prompt = [_user(prompt)]
    name, given = ("messages", messages) if messages is not None else ("prompt", prompt)
    if given is not None and row.get("functions") not in _NOTHING:
        raise DatasetError(f"{where}: functions: {_why_refused('functions')}")
    prompt_name = source_names.get(name, name)
    return _Form(
        messages=None if given is None else _checked_messages(given, where, prompt_name),
        prompt_name=prompt_name,
        other_fields=_others(row, _PLAIN_FIELDS),
        source_names=dict(source_names),
        task_name=row.get("task_name"),
        task_id=row.get("task_id"),
        metadata=row.get("metadata"),
        stop_strings=row.get("stop_strings"),
        sampling=row.get("sampling"),
        idx=row.get("idx"),
        tools=row.get("tools"),
    )


def _batch_form(row: dict[str, Any], where: str, source_names: Mapping[str, str]) -> _Form:
    body = row["body"]
    form = _plain_form({**row, "messages": None, "prompt": None}, where, source_names)
    form.messages, form.prompt_name = _request_messages(body, where, "body"), "body"
    form.other_fields = _others(row, _BATCH_FIELDS)
    if form.messages is None:
        raise DatasetError(f"{where}: body: messages and input are missing; only chat requests can be read")
    _take_parameters(form, body, where, "body")
    form.idx = row["custom_id"] if form.idx is None else form.idx
    return form


def _gym_form(row: dict[str, Any], where: str, source_names: Mapping[str, str], task_names: Collection[str]) -> _Form:
    name = "responses_create_params"
    params, agent = row[name], row.get("agent_ref")
    if not isinstance(params, dict):
        raise DatasetError(f"{where}: {name}: found {_kind(params)}; it must be an object")
    if agent is not None and not isinstance(agent, dict):
        raise DatasetError(f"{where}: agent_ref: found {_kind(agent)}; it must be an object with a name")
    own_tools = row.get("tools") if "tools" in source_names else None
    form = _plain_form({**row, "messages": None, "prompt": None, "tools": own_tools}, where, source_names)
    form.messages, form.prompt_name = _request_messages(params, where, name), f"{name}.input"
    _take_parameters(form, params, where, name)
    data = {}
    if form.task_name is not None and form.task_name not in task_names:
        # Gym has no such field: it is the data's own.
        data, form.task_name = {"task_name": form.task_name}, None
    if form.task_name is None and agent is not None:
        form.task_name, form.source_names["task_name"] = agent.get("name"), _AGENT_NAME
    if form.task_id is None and row.get("_ng_task_index") is not None:
        form.task_id, form.source_names["task_id"] = row["_ng_task_index"], "_ng_task_index"
    own = _GYM_FIELDS if own_tools is None else _GYM_FIELDS | {"tools"}
    others = {key: value for key, value in _others(row, own).items() if not key.startswith("_ng_")}
    form.other_fields = {**others, **data}
    # Gym passes the whole row to its environments.
    form.metadata = _whole_metadata(form.other_fields, form.metadata, where)
    return form


def _plain_request(row: dict[str, Any], where: str) -> dict[str, Any]:
    """A row of NeMo Gym with the settings of `metadata.extra_body` among the others; any other row unchanged.

    Rows that Gym has numbered by rollout have the number as their seed. It would make the rollouts of one task
    different rows, so it is left out: every sample has a seed of its own.
    """
    params = row.get("responses_create_params")
    if not isinstance(params, dict):
        return row
    given = params.get("metadata")
    metadata: dict[str, Any] = given if isinstance(given, dict) else {}
    extra = _extra_body(metadata.get("extra_body"), where)
    for key in extra:
        if key in params and params[key] != extra[key]:
            raise DatasetError(
                f"{where}: {_EXTRA_BODY}.{key}: responses_create_params.{key} is another value; keep one of the two"
            )
        if key not in _PARAMETERS and key != "stop":
            raise DatasetError(f"{where}: {_EXTRA_BODY}.{key}: {_why_refused(key)}")
    numbered = any(row.get(name) is not None for name in _ROLLOUT_FIELDS) and ("seed" in params or "seed" in extra)
    if not extra and not numbered:
        return row
    plain = {**params, **extra}
    if extra:
        plain["metadata"] = {key: value for key, value in metadata.items() if key != "extra_body"}
    if numbered:
        del plain["seed"]
    return {**row, "responses_create_params": plain}


def _extra_body(text: Any, where: str) -> dict[str, Any]:
    """Settings beyond the Responses API, which Gym writes as JSON into a text."""
    if text in _NOTHING:
        return {}
    try:
        found = orjson.loads(text)
    except (TypeError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise DatasetError(f"{where}: {_EXTRA_BODY}: found {_kind(text)}; it must be text with a JSON object")
    return found


def _others(row: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in own}


def _whole_metadata(rest: Mapping[str, Any], metadata: Any, where: str) -> Any:
    """Metadata together with a row's other fields."""
    if not isinstance(metadata, dict):
        return (dict(rest) or None) if metadata is None else metadata
    twice = sorted(key for key in metadata.keys() & rest.keys() if metadata[key] != rest[key])
    if twice:
        raise DatasetError(
            f"{where}: metadata.{twice[0]}: the row also has a different {twice[0]} outside its metadata; keep "
            "one of the two"
        )
    return {**rest, **metadata}


def _request_messages(params: Mapping[str, Any], where: str, name: str) -> list[dict[str, Any]] | None:
    """Prompt of a request of the Responses API or of chat completions."""
    given, items, instructions = params.get("messages"), params.get("input"), params.get("instructions")
    if given is not None and items is not None:
        raise DatasetError(f"{where}: {name}: messages and input exclude each other: keep one")
    if given is not None:
        return _checked_messages(given, where, f"{name}.messages")
    if items is None:
        return None
    if isinstance(items, str):
        items = [_user(items)]
    if isinstance(items, list):
        try:
            items = messages_of_items(items, f"{name}.input")
        except InvalidItem as error:
            raise DatasetError(f"{where}: {error}") from error
    messages = _checked_messages(items, where, f"{name}.input")
    if instructions is None:
        return messages
    if not isinstance(instructions, str):
        raise DatasetError(f"{where}: {name}.instructions: found {_kind(instructions)}; it must be text")
    return [{"role": "system", "content": instructions}, *messages]


def _take_parameters(form: _Form, params: Mapping[str, Any], where: str, name: str) -> None:
    """Copy a request's sampling, stop strings and tools into a form; the row's own take precedence."""
    if params.get("tools") not in _NOTHING:
        if (choice := params.get("tool_choice")) not in (None, "auto"):
            raise DatasetError(
                f"{where}: {name}.tool_choice: found {_kind(choice)}; only auto is supported, where the policy decides "
                "whether it calls a tool: remove it, and for none the tools, too"
            )
        if form.tools in _NOTHING:
            form.tools, form.source_names["tools"] = params["tools"], f"{name}.tools"
    for key, value in params.items():
        if key in _PARAMETERS or key in _PROMPT_PARAMETERS or key in _IDLE_PARAMETERS or value in _NOTHING:
            continue
        if key == "n" and value == 1:
            continue
        raise DatasetError(f"{where}: {name}.{key}: {_why_refused(key)}")
    if form.sampling is None or isinstance(form.sampling, dict):
        form.sampling = _snake_case(form.sampling or {}, form.source_names, "sampling")
        taken = {key: value for key, value in params.items() if key in _PARAMETERS}
        form.sampling = _snake_case(taken, form.source_names, name) | form.sampling
    stop = params.get("stop")
    if form.stop_strings is None and stop is not None:
        form.stop_strings, form.source_names["stop_strings"] = [stop] if isinstance(stop, str) else stop, f"{name}.stop"


def _why_refused(key: str) -> str:
    if key == "n":
        return "the number of samples is the job's dataset.repeats; remove it"
    if key == "functions":
        return "the old name of tools, with another form; give them as tools"
    return "not supported: it would change the sampled tokens; remove it"


def _tools(form: _Form, where: str) -> list[Tool] | None:
    """The row's tools: a list of functions, or its JSON as text, as columnar files have it."""
    given, source_name = form.tools, form.source_names.get("tools", "tools")
    if isinstance(given, str) and given:
        try:
            given = orjson.loads(given)
        except ValueError as error:
            raise DatasetError(f"{where}: {source_name}: found text that is not JSON: {error}. {_NOT_TOOLS}") from error
    if given in _NOTHING:
        return None
    try:
        return checked_tools(given, source_name)
    except InvalidTools as error:
        raise DatasetError(f"{where}: {error}. {_NOT_TOOLS}") from error


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _checked_messages(messages: Any, where: str, source_name: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list):
        raise DatasetError(f"{where}: {source_name}: found {_kind(messages)}; it must be a list of messages")
    checked = [
        _checked_message(message, f"{where}: {source_name}[{number}]") for number, message in enumerate(messages)
    ]
    if checked and checked[-1]["role"] == "assistant":
        raise DatasetError(f"{where}: {source_name}[{len(checked) - 1}]: {_ASSISTANT_LAST}")
    return checked


def _checked_message(message: Any, source_name: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise DatasetError(f"{source_name}: found {_kind(message)}; a message is an object with a role and a content")
    role = message.get("role")
    if not isinstance(role, str):
        raise DatasetError(f"{source_name}: a message is an object with a role and a content, texts")
    # Chat templates test whether a field exists, not whether it is null.
    given = {key: value if key in ("content", "tool_calls") else bare(value) for key, value in message.items()}
    given = {key: value for key, value in given.items() if value is not None}
    # OpenAI's newer name for system; templates that do not know it silently drop the message.
    given["role"] = "system" if role == "developer" else role
    calls = given.pop("tool_calls", None)
    if calls not in _NOTHING:
        try:
            given["tool_calls"] = checked_calls(calls, f"{source_name}.tool_calls")
        except InvalidTools as error:
            raise DatasetError(str(error)) from error
    # A message that only calls tools has no content.
    given["content"] = "" if message.get("content") is None and calls else _text(message.get("content"), source_name)
    return given


def _text(content: Any, source_name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise DatasetError(f"{source_name}.content: found {_kind(content)}; it must be text or a list of parts of text")
    return "".join(_part_text(part, f"{source_name}.content[{number}]") for number, part in enumerate(content))


def _part_text(part: Any, source_name: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else _kind(part)
    text = part.get("text") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS or not isinstance(text, str):
        raise DatasetError(f"{source_name}: found a part of type {kind!r}; only text is supported")
    return text


def _prompt(form: _Form, row: Mapping[str, Any], where: str, template: PromptTemplate | None) -> list[dict[str, Any]]:
    if form.messages is not None and template is None:
        return form.messages
    if form.messages == [] and template is not None:
        # NeMo Gym's rows for a prompt configuration have an empty input.
        form.messages = None
    if template is None:
        raise DatasetError(
            f"{where}: messages and prompt are missing, and the job has no dataset.promptTemplate; the row has "
            f"{', '.join(map(str, row)) or 'no fields'}. If one of them is the prompt, name it: dataset.columns: "
            "{prompt: FIELD}"
        )
    if form.messages is not None:
        name = form.prompt_name
        movable = (
            f". To use the field in the template, as {{{name}}}, say that it is not the prompt: dataset.columns: "
            f"{{metadata.{name}: {name}}}"
        )
        raise DatasetError(
            f"{where}: {name}: the row has a prompt already, and the job has a dataset.promptTemplate: remove one of "
            f"the two{movable if name in row else ''}"
        )
    texts = [("system", template.system), ("user", template.user)]
    return [{"role": role, "content": _fill(text, row, where)} for role, text in texts if text is not None]


def _fill(text: str, row: Mapping[str, Any], where: str) -> str:
    try:
        return string.Formatter().vformat(text, (), bare(row))
    except KeyError as error:
        raise DatasetError(
            f"{where}: the job's promptTemplate uses {{{error.args[0]}}}, which this row does not have; "
            "write {{ and }} for braces"
        ) from error
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise DatasetError(f"{where}: the job's promptTemplate cannot be filled: {error}") from error


def _task_name(
    form: _Form, where: str, task_names: Sequence[str], default: str | None, gym_agents: Collection[str]
) -> str:
    name, source_name = form.task_name, form.source_names.get("task_name", "task_name")
    if name is not None and name not in task_names and source_name == _AGENT_NAME and len(gym_agents) == 1:
        # The agent is one of those behind this environment.
        (name,) = gym_agents
    if name is None and default is not None:
        return default
    if name is None and len(task_names) == 1:
        return task_names[0]
    if name is None:
        raise DatasetError(
            f"{where}: {source_name} is missing; with several environments each row names its own: "
            f"{', '.join(task_names)}"
        )
    if name not in task_names:
        raise DatasetError(
            f"{where}: {source_name}: found {name!r}; the job's environments are {', '.join(task_names)}. "
            "Fix the row, or add the environment to spec.environments"
        )
    return str(name)


def _task_id(form: _Form, where: str) -> str | int | None:
    found = form.task_id
    if found is None or (isinstance(found, str) and found):
        return found
    if isinstance(found, float) and found.is_integer():
        return int(found)
    if isinstance(found, bool) or not isinstance(found, int):
        source_name = form.source_names.get("task_id", "task_id")
        raise DatasetError(f"{where}: {source_name}: found {_kind(found)}; it must be text or a whole number")
    return found


def _stop_strings(value: Any, where: str, source_name: str) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(stop, str) and stop for stop in value):
        raise DatasetError(f"{where}: {source_name}: found {_kind(value)}; it must be a list of texts")
    return tuple(value)


def _sampling(form: _Form, where: str) -> dict[str, Any]:
    """A row's sampling overrides; keys may be the manifest's camelCase or vLLM's snake_case."""
    if form.sampling is None:
        return {}
    if not isinstance(form.sampling, dict):
        raise DatasetError(f"{where}: sampling: found {_kind(form.sampling)}; it must be an object")
    named = _snake_case(form.sampling, form.source_names, "sampling")
    unknown = sorted(set(named) - set(_SAMPLING_ALIASES.values()))
    if unknown:
        allowed = ", ".join(sorted(_SAMPLING_ALIASES))
        raise DatasetError(f"{where}: {form.source_names[unknown[0]]}: unknown; a row may set {allowed}")
    try:
        Sampling.model_validate({to_camel(name): setting for name, setting in named.items()})
    except ValidationError as error:
        mistakes = (
            f"{form.source_names[_SAMPLING_ALIASES[str(mistake['loc'][0])]]}: found {_kind(mistake['input'])}; "
            f"{mistake['msg'].lower()}"
            for mistake in error.errors(include_url=False)
        )
        raise DatasetError(f"{where}: {'; '.join(mistakes)}") from error
    return named


def _snake_case(sampling: Mapping[str, Any], source_names: dict[str, str], name: str) -> dict[str, Any]:
    """Sampling settings by our names; records the row's own names."""
    named = {}
    for key, setting in sampling.items():
        if setting is not None:
            ours = _ours(key)
            source_names.setdefault(ours, source_names.get(f"sampling.{key}", f"{name}.{key}"))
            named[ours] = setting
    return named


def _ours(key: str) -> str:
    """Our name of a sampling setting."""
    return _PARAMETERS.get(key) or _SAMPLING_ALIASES.get(key) or key


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, (dict, list)):
        article = "an empty" if not value else "an" if isinstance(value, dict) else "a"
        return f"{article} {'object' if isinstance(value, dict) else 'list'}"
    kind = "text" if isinstance(value, str) else "a boolean" if isinstance(value, bool) else "a number"
    return f"{kind} {json.dumps(value, ensure_ascii=False)[:60]}"
