"""Validation of one dataset row, in any of the supported formats."""

from __future__ import annotations

import json
import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson
from pydantic import ValidationError
from pydantic.alias_generators import to_camel

from kuberoll_api.model.dataset import PromptTemplate
from kuberoll_api.model.generation import Sampling
from kuberoll_workers.data.tracebacks import Traceback

# The run sets the seed: a seed in the row would make all samples of its group equal.
_SAMPLING_ALIASES = {to_camel(name): name for name in Sampling.model_fields if name != "seed"}

# Sampling parameters of a request, in the spelling of OpenAI's APIs and of vLLM.
_PARAMETERS = {
    **{name: name for name in Sampling.model_fields if name not in ("greedy", "seed", "stop")},
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
}
_PROMPT_PARAMETERS = {"input", "messages", "instructions", "stop"}
# Parameters that do not change which tokens a policy samples.
_IDLE_PARAMETERS = {
    "background", "include", "logprobs", "metadata", "model", "parallel_tool_calls", "prompt_cache_key",
    "safety_identifier", "service_tier", "store", "stream", "stream_options", "tool_choice", "top_logprobs",
    "truncation", "user",
}  # fmt: skip
_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})

_TEXT_PARTS = ("text", "input_text", "output_text")

# Gym's numbering of a rollout, which would make the samples of a task different rows.
_ROLLOUT_FIELDS = ("_ng_rollout_index", "_ng_attempt_index", "_ng_rollout_id")
_GYM_FIELDS = {
    "responses_create_params", "agent_ref", "task_name", "task_id", "sampling", "stop_strings", "idx", "metadata",
}  # fmt: skip

_ASSISTANT_LAST = (
    "the last message is the assistant's: as a prompt it would give the answer away. Move it to the field that the "
    "environment reads: jq -c '.metadata.ground_truth = .messages[-1].content | del(.messages[-1])'"
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
        messages: The prompt's chat messages, at least one, with text content.
        metadata: Initial state of the episode.
        sampling: Overrides of the job's sampling, by snake_case name.
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

    @property
    def where(self) -> str:
        return str(self.place)


@dataclass(slots=True, kw_only=True)
class _Form:
    """Fields of a row, under the names of the plain format.

    Attributes:
        messages: The prompt; None if the row has none and needs the job's template.
        source_names: The row's own name of a field, if it differs from the plain format's.
    """

    messages: list[dict[str, Any]] | None
    task_name: Any
    task_id: Any
    metadata: Any
    stop_strings: Any
    sampling: Any
    idx: Any
    source_names: dict[str, str] = field(default_factory=dict)


def parse_row(row: Any, *, place: RowPosition, task_names: Sequence[str], template: PromptTemplate | None) -> Row:
    """Validate one row.

    A plain row has its prompt in `messages` (chat messages) or `prompt` (text or chat messages), or the job has a
    promptTemplate over the row's fields; `task_name` names its environment (not needed when there is one only);
    `task_id`, `metadata`, `stop_strings`, `sampling` and `idx` are optional. Rows of NeMo Gym
    (`responses_create_params`) and of OpenAI's batch API (`custom_id`, `body`) are read as they are. A field that is
    null counts as absent.

    Args:
        task_names: Names of the job's environments, in their order.

    Raises:
        DatasetError: The row is invalid; the message names the row and the field.
    """
    where = str(place)
    if not isinstance(row, dict):
        raise DatasetError(f"{where}: found {_kind(row)}; a row is a JSON object")
    form = _form(row, where)
    metadata = form.metadata
    if metadata is not None and not isinstance(metadata, dict):
        raise DatasetError(f"{where}: metadata: found {_kind(metadata)}; it must be an object")
    task_id = _task_id(form, where)
    messages = form.messages if form.messages is not None else _templated(row, where, template)
    return Row(
        place=place,
        content=canonical({key: value for key, value in row.items() if key not in _ROLLOUT_FIELDS}, where),
        task_id=task_id,
        task_name=_task_name(form, where, task_names),
        messages=messages,
        metadata=metadata,
        stop_strings=_stop_strings(form.stop_strings, where, form.source_names.get("stop_strings", "stop_strings")),
        sampling=_sampling(form, where),
        idx=form.idx if form.idx is not None else task_id,
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
            return orjson.dumps(_bare(value), option=orjson.OPT_SORT_KEYS)
        return text
    except (TypeError, RecursionError) as error:
        raise DatasetError(f"{where}: the row cannot be written as JSON: {error}") from error


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _bare(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_bare(item) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            raise TypeError(f"found {value}, which JSON does not have; use null instead")
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    return value


def _form(row: dict[str, Any], where: str) -> _Form:
    if row.get("responses_create_params") is not None:
        return _gym_form(row, where)
    if row.get("custom_id") is not None and isinstance(row.get("body"), dict):
        return _batch_form(row, where)
    return _plain_form(row, where)


def _plain_form(row: dict[str, Any], where: str) -> _Form:
    messages, prompt = row.get("messages"), row.get("prompt")
    if messages is not None and prompt is not None:
        raise DatasetError(f"{where}: messages and prompt exclude each other: keep one")
    if isinstance(prompt, str):
        prompt = [_user(prompt)]
    source_name, given = ("messages", messages) if messages is not None else ("prompt", prompt)
    if given is not None:
        _refuse_tools(row, where)
    return _Form(
        messages=None if given is None else _checked_messages(given, where, source_name),
        task_name=row.get("task_name"),
        task_id=row.get("task_id"),
        metadata=row.get("metadata"),
        stop_strings=row.get("stop_strings"),
        sampling=row.get("sampling"),
        idx=row.get("idx"),
    )


def _batch_form(row: dict[str, Any], where: str) -> _Form:
    body = row["body"]
    form = _plain_form({**row, "messages": None, "prompt": None}, where)
    form.messages = _request_messages(body, where, "body")
    if form.messages is None:
        raise DatasetError(f"{where}: body: messages and input are missing; only chat requests can be read")
    _take_parameters(form, body, where, "body")
    form.idx = row["custom_id"] if form.idx is None else form.idx
    return form


def _gym_form(row: dict[str, Any], where: str) -> _Form:
    name = "responses_create_params"
    params, agent = row[name], row.get("agent_ref")
    if not isinstance(params, dict):
        raise DatasetError(f"{where}: {name}: found {_kind(params)}; it must be an object")
    if agent is not None and not isinstance(agent, dict):
        raise DatasetError(f"{where}: agent_ref: found {_kind(agent)}; it must be an object with a name")
    form = _plain_form({**row, "messages": None, "prompt": None}, where)
    form.messages = _request_messages(params, where, name)
    _take_parameters(form, params, where, name)
    if form.task_name is None and agent is not None:
        form.task_name, form.source_names["task_name"] = agent.get("name"), "agent_ref.name"
    if form.task_id is None and row.get("_ng_task_index") is not None:
        form.task_id, form.source_names["task_id"] = row["_ng_task_index"], "_ng_task_index"
    form.metadata = _gym_metadata(row, form.metadata, where)
    return form


def _gym_metadata(row: Mapping[str, Any], metadata: Any, where: str) -> Any:
    """Initial state of a Gym row: Gym passes the whole row to its environments, so all fields beside the prompt."""
    rest = {key: value for key, value in row.items() if key not in _GYM_FIELDS and not key.startswith("_ng_")}
    if not isinstance(metadata, dict):
        return (rest or None) if metadata is None else metadata
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
        items = [_input_message(item, f"{where}: {name}.input[{number}]") for number, item in enumerate(items)]
    messages = _checked_messages(items, where, f"{name}.input")
    if instructions is None:
        return messages
    if not isinstance(instructions, str):
        raise DatasetError(f"{where}: {name}.instructions: found {_kind(instructions)}; it must be text")
    return [{"role": "system", "content": instructions}, *messages]


def _input_message(item: Any, source_name: str) -> Any:
    if not isinstance(item, dict):
        return item
    kind = item.get("type")
    if kind not in (None, "message"):
        raise DatasetError(f"{source_name}: found an item of type {kind!r}; a prompt can only contain text messages")
    return {key: item.get(key) for key in ("role", "content")}


def _take_parameters(form: _Form, params: Mapping[str, Any], where: str, name: str) -> None:
    """Copy a request's sampling and stop strings into a form; the row's own take precedence."""
    for key, value in params.items():
        if key in _PARAMETERS or key in _PROMPT_PARAMETERS or key in _IDLE_PARAMETERS or value in _NOTHING:
            continue
        if key == "n" and value == 1:
            continue
        raise DatasetError(f"{where}: {name}.{key}: {_why_refused(key)}")
    metadata = params.get("metadata")
    if isinstance(metadata, dict) and metadata.get("extra_body") not in (*_NOTHING, "{}"):
        raise DatasetError(f"{where}: {name}.metadata.extra_body: not read; put its settings into the row's sampling")
    if form.sampling is None or isinstance(form.sampling, dict):
        form.sampling = _snake_case(form.sampling or {}, form.source_names, "sampling")
        taken = {key: value for key, value in params.items() if key in _PARAMETERS}
        form.sampling = _snake_case(taken, form.source_names, name) | form.sampling
    stop = params.get("stop")
    if form.stop_strings is None and stop is not None:
        form.stop_strings, form.source_names["stop_strings"] = [stop] if isinstance(stop, str) else stop, f"{name}.stop"


def _why_refused(key: str) -> str:
    if key == "seed":
        return "a row cannot set it, because every sample has its own seed (dataset.seedPerRepeat); remove it"
    if key == "n":
        return "the number of samples is the job's dataset.repeats; remove it"
    if key in ("tools", "functions"):
        return "tools are not supported; describe them in the prompt, or remove them"
    return "not supported: it would change the sampled tokens; remove it"


def _refuse_tools(row: Mapping[str, Any], where: str) -> None:
    for key in ("tools", "functions"):
        if row.get(key) not in _NOTHING:
            raise DatasetError(f"{where}: {key}: {_why_refused(key)}")


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _checked_messages(messages: Any, where: str, source_name: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise DatasetError(
            f"{where}: {source_name}: found {_kind(messages)}; it must be a list of at least one message"
        )
    checked = [
        _checked_message(message, f"{where}: {source_name}[{number}]") for number, message in enumerate(messages)
    ]
    if checked[-1]["role"] == "assistant":
        raise DatasetError(f"{where}: {source_name}[{len(checked) - 1}]: {_ASSISTANT_LAST}")
    return checked


def _checked_message(message: Any, source_name: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise DatasetError(f"{source_name}: found {_kind(message)}; a message is an object with a role and a content")
    role = message.get("role")
    if not isinstance(role, str):
        raise DatasetError(f"{source_name}: a message is an object with a role and a content, texts")
    # Chat templates test whether a field exists, not whether it is null.
    given = {key: value for key, value in message.items() if value is not None}
    # OpenAI's newer name for system; templates that do not know it silently drop the message.
    given["role"] = "system" if role == "developer" else role
    given["content"] = _text(message.get("content"), source_name)
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


def _templated(row: Mapping[str, Any], where: str, template: PromptTemplate | None) -> list[dict[str, Any]]:
    if template is None:
        raise DatasetError(f"{where}: messages and prompt are missing, and the job has no dataset.promptTemplate")
    texts = [("system", template.system), ("user", template.user)]
    return [{"role": role, "content": _fill(text, row, where)} for role, text in texts if text is not None]


def _fill(text: str, row: Mapping[str, Any], where: str) -> str:
    try:
        return string.Formatter().vformat(text, (), row)
    except KeyError as error:
        raise DatasetError(
            f"{where}: the job's promptTemplate uses {{{error.args[0]}}}, which this row does not have; "
            "write {{ and }} for braces"
        ) from error
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise DatasetError(f"{where}: the job's promptTemplate cannot be filled: {error}") from error


def _task_name(form: _Form, where: str, task_names: Sequence[str]) -> str:
    name, source_name = form.task_name, form.source_names.get("task_name", "task_name")
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
            ours = _PARAMETERS.get(key) or _SAMPLING_ALIASES.get(key) or key
            source_names.setdefault(ours, f"{name}.{key}")
            named[ours] = setting
    return named


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, (dict, list)):
        article = "an empty" if not value else "an" if isinstance(value, dict) else "a"
        return f"{article} {'object' if isinstance(value, dict) else 'list'}"
    kind = "text" if isinstance(value, str) else "a boolean" if isinstance(value, bool) else "a number"
    return f"{kind} {json.dumps(value, ensure_ascii=False)[:60]}"
