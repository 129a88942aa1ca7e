"""Types of Parquet columns that have JSON: chat messages with calls, and tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    import pyarrow


def message_type(calls: bool) -> pyarrow.DataType:
    """Type of a chat message.

    Args:
        calls: With fields for calls of tools, and answers to them.
    """
    import pyarrow as pa

    text = pa.string()
    function = pa.struct([("name", text), ("arguments", pa.json_())])
    call = pa.struct([("id", text), ("type", text), ("function", function)])
    more = [("tool_calls", pa.list_(call)), ("tool_call_id", text), ("name", text)]
    return pa.struct([("role", text), ("content", text), *(more if calls else [])])


def storage_type(kind: pyarrow.DataType) -> pyarrow.DataType:
    """The type with JSON as text."""
    import pyarrow as pa

    if pa.types.is_list(kind):
        return pa.list_(storage_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, storage_type(field.type)) for field in kind])
    return pa.string() if isinstance(kind, pa.JsonType) else kind


def with_json(value: Any, kind: pyarrow.DataType) -> Any:
    """The value with JSON as text."""
    import pyarrow as pa

    if value is None:
        return None
    if pa.types.is_list(kind):
        return [with_json(item, kind.value_type) for item in value]
    if pa.types.is_struct(kind):
        return {field.name: with_json(value.get(field.name), field.type) for field in kind}
    return orjson.dumps(value).decode() if isinstance(kind, pa.JsonType) else value
