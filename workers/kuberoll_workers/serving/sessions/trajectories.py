"""A session's paths in the form of trajectories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kuberoll_workers.data.tools import Tool, ToolCall
from kuberoll_workers.serving.openai_api.continuation import Texts
from kuberoll_workers.serving.sessions.store import Session
from kuberoll_workers.serving.sessions.tree import Call, Segment


def trajectories(session: Session, texts: Texts | None) -> list[dict[str, Any]]:
    """One trajectory for each path from a root of the session's tree to a leaf, as plain values.

    Its `messages` have `token_ids`; the ids of all of them, one after the other, are what the model read and sampled.
    Messages of role `assistant` were sampled, with `logprobs` and `policy_versions`; `learn` is false where another
    trajectory of the session has the same response, so that no response is learned from twice; their `tool_calls` are
    what the job's parser reads in them, with the ids that they had for the agent, if it went on. Messages of role
    `context` were only read; their `chat` has the messages of the request that they were made of. `tools` are those
    that its first request declared, if any.

    Args:
        texts: Conversions of the model; None: nothing was sampled yet.
    """
    if texts is None:
        return []
    return [_trajectory(session, number, path, texts) for number, path in enumerate(session.tree.paths())]


def _trajectory(session: Session, number: int, path: Sequence[Segment], texts: Texts) -> dict[str, Any]:
    calls = [session.tree.calls[segment.call] for segment in path if segment.call is not None]
    read = sum(len(segment.token_ids) for segment in path if segment.call is None)
    sampled = sum(len(call.sampled.response) for call in calls)
    tools = calls[0].tools if calls else ()
    repeated = {call.parent: call.repeated for call in calls}
    return {
        "session": session.identity,
        "path": number,
        **({"tools": list(tools)} if tools else {}),
        "messages": [
            _message(session, before, segment, texts, tools, repeated.get(segment.call, ()))
            for before, segment in zip((None, *path), path, strict=False)
        ],
        "turn_count": len(calls),
        "tokens": {"context": read, "generated": sampled},
        "finish_reason": calls[-1].sampled.finish_reason if calls else None,
        "continuity": dict(Counter(call.sampled.continuity for call in calls)),
        "token_source": "engine",
        "timing": {
            "generation_seconds": [call.sampled.ended - call.sampled.began for call in calls],
            "ended_at": [call.sampled.ended for call in calls],
        },
    }


def _message(
    session: Session,
    before: Segment | None,
    segment: Segment,
    texts: Texts,
    tools: Sequence[Tool],
    repeated: Sequence[ToolCall],
) -> dict[str, Any]:
    content = texts.decode(segment.token_ids)
    message = {
        "role": "context" if segment.call is None else "assistant",
        "content": content,
        "token_ids": segment.token_ids.tolist(),
    }
    if segment.call is None:
        return message if segment.chat is None else {**message, "chat": list(segment.chat)}
    call: Call = session.tree.calls[segment.call]
    ended = segment.token_ids[-1] == texts.end
    opened = None if before is None or texts.opened is None else texts.opened(before.token_ids)
    said, calls = texts.read(
        texts.decode(segment.token_ids[:-1]) if ended else content,
        tools,
        call.sampled.demand,
        opened,
        call.sampled.finish_reason == "length",
    )
    return {
        **message,
        "logprobs": call.sampled.logprobs.tolist(),
        "policy_versions": [list(span) for span in call.sampled.versions],
        "learn": segment.learn,
        "finish_reason": call.sampled.finish_reason,
        "sampling": call.sampled.distribution,
        **({"tool_calls": _with_ids(calls, repeated), "text": said} if calls else {}),
    }


def _with_ids(calls: Sequence[ToolCall], repeated: Sequence[ToolCall]) -> list[ToolCall]:
    """Calls with the ids by which the answers name them.

    Most models write none: those that the agent was given are only in the request with which it went on.

    Args:
        repeated: The calls in that request; none: there is none.
    """
    names, same = ([call["function"].get("name") for call in given] for given in (calls, repeated))
    if names != same:
        return list(calls)
    return [{"id": given["id"], **call} for call, given in zip(calls, repeated, strict=True)]
