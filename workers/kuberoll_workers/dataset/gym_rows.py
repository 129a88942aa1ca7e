"""Rows of datasets as NeMo Gym materializes them."""

from __future__ import annotations

from typing import Any

import orjson

from kuberoll_workers.data.gym_requests import AGENT, PARAMS, TASK, agent_ref, request_params
from kuberoll_workers.data.response_items import input_items, tool_items
from kuberoll_workers.dataset.rows import Row


def row_of_dataset(row: Row) -> dict[str, Any]:
    """The row of a task as Gym would have materialized it, without the numbers of a rollout.

    A row that has Gym's form comes back with the fields that it had; a prompt that a template wrote is its `input`.
    Settings that the Responses API does not have are in `metadata.extra_body`.
    """
    given = _fields(row)
    params = given.get(PARAMS)
    if isinstance(params, dict):
        fields = {name: value for name, value in given.items() if not name.startswith("_ng_")}
        params = {name: value for name, value in params.items() if name != "messages"}
        if not params.get("input"):
            params["input"] = input_items(row.messages)
            params.pop("instructions", None)
    else:
        fields = dict(row.metadata or {})
        params = {"input": input_items(row.messages), **row.sampling}
        if row.tools is not None:
            params["tools"] = tool_items(row.tools)
    if row.stop_strings is not None:
        fields["stop_strings"] = list(row.stop_strings)
        params.pop("stop", None)
    agent = fields.get(AGENT)
    if not isinstance(agent, dict) or not agent.get("name"):
        fields[AGENT] = agent_ref(row.task_name)
    return {**fields, PARAMS: request_params(params)}


def task_number(row: Row) -> int | None:
    """Gym's own number of a row's task; None if it has none."""
    number = _fields(row).get(TASK)
    return number if isinstance(number, int) and not isinstance(number, bool) else None


def names_agent(row: Row) -> bool:
    """True if the row itself says to which of Gym's agents it goes."""
    agent = _fields(row).get(AGENT)
    return isinstance(agent, dict) and bool(agent.get("name"))


def _fields(row: Row) -> dict[str, Any]:
    # The name of a source precedes the content of rows of several.
    text = row.given if row.given is not None else row.content[row.content.index(b"{") :]
    fields: dict[str, Any] = orjson.loads(text)
    return fields
