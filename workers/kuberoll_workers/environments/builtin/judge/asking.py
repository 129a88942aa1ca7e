"""Asking a judge: one chat request for each question, and its verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kuberoll_workers.environments.builtin.judge.verdicts import VerdictForm
from kuberoll_workers.environments.model_client import ModelClient, ServerFailed

MAX_SAID: Final = 100_000
"""Characters of a judge's text that are kept."""


class NoVerdict(Exception):
    """The judge's text has no verdict; the message has its end."""


async def ask(
    client: ModelClient, model: str, messages: list[dict[str, str]], form: VerdictForm, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Ask a judge once.

    Args:
        config: `max_tokens`, `temperature`, and fields that are added or, with None, left out.

    Returns:
        `text`, what the judge wrote; `verdict` and `score`, None if its text has none.

    Raises:
        ServerFailed: It could not be asked.
    """
    body: dict[str, Any] = {"model": model, "messages": messages, **config}
    if form.schema is not None:
        schema = {"name": "verdict", "schema": form.schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    answer = await client.post(
        "/v1/chat/completions", {name: value for name, value in body.items() if value is not None}
    )
    try:
        choice = answer["choices"][0]
        text, cut = choice["message"].get("content") or "", choice.get("finish_reason") == "length"
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ServerFailed(f"the judge's answer is not a chat completion: {str(answer)[:500]}") from error
    if not isinstance(text, str):
        raise ServerFailed(f"the judge's answer has no text: {str(answer)[:500]}")
    # A text that was cut has not come to its verdict, even if it names one on the way.
    verdict = None if cut else form.read(text)
    return {
        "text": text if len(text) <= MAX_SAID else f"{text[:MAX_SAID]}…",
        "verdict": None if verdict is None else verdict.label,
        "score": None if verdict is None else verdict.score,
        **({"cut": True} if cut else {}),
    }
