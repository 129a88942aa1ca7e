"""A judge: how it is asked, and what it says."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import Field, StringConstraints, field_validator

from kuberoll_workers.environments.builtin.judge import prompts
from kuberoll_workers.environments.builtin.judge.texts import question_of, reference_of
from kuberoll_workers.environments.builtin.judge.verdicts import JsonLabels, Labels, VerdictForm
from kuberoll_workers.environments.builtin.servers import Server, ServerConfig
from kuberoll_workers.environments.interface import ChatMessage
from kuberoll_workers.environments.model_client import ModelClient, ServerUnavailable

Text = Annotated[str, StringConstraints(min_length=1, max_length=65536)]
Label = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Ask: TypeAlias = Callable[[Mapping[str, str]], Coroutine[Any, Any, dict[str, Any]]]
"""Asks the judge about the texts of the prompt's placeholders; see `Judge.opened`."""

MAX_SAID: Final = 100_000
"""Characters of a judge's text that are kept."""


class NoVerdict(Exception):
    """The judge's text has no verdict; the message has its end."""

    @classmethod
    def of(cls, text: str, unparsed: str) -> Self:
        """The error of a text; `unparsed` names the value of the config's key with which it would be none."""
        return cls(
            f"the judge's answer has no verdict: …{text[-300:]!r}. Set config.unparsed to {unparsed}, or change the "
            "prompt, maxTokens or form (JSON)"
        )


class AskingConfig(ServerConfig):
    """The judge, its prompt, and the form of its verdicts."""

    system: Annotated[str, StringConstraints(max_length=65536)] = Field(
        default=prompts.SYSTEM, description="System message; empty: none."
    )
    prompt: Text
    form: Literal["Text", "JSON"] = Field(
        default="Text", description="Text: the last label counts. JSON: an object, by structured outputs of the server."
    )
    max_tokens: int = Field(default=1024, ge=1, le=1 << 20, description="Length of a judge's answer.")
    temperature: float = Field(default=0.0, ge=0, le=100, description="Temperature of the judge.")
    max_characters: int = Field(
        default=50_000,
        ge=1,
        le=1 << 22,
        description="Characters of a response that are shown to it; judge shortens question and reference, too.",
    )

    @field_validator("prompt")
    @classmethod
    def _can_be_filled(cls, prompt: str) -> str:
        prompts.placeholders(prompt)
        return prompt

    def labelled(self, scores: Mapping[str, float]) -> VerdictForm:
        """The form whose verdicts are labels with these scores."""
        return (Labels if self.form == "Text" else JsonLabels)(scores)


class Judge:
    """A judge that is asked about rows, with one chat request for each question."""

    def __init__(self, config: AskingConfig, form: VerdictForm, *, has_reference: bool) -> None:
        """
        Args:
            has_reference: Whether rows need a reference answer, because the prompt shows it.
        """
        self._config = config
        self._form = form
        self._has_reference = has_reference
        self._server = Server(config)

    def texts_of(self, log: Sequence[ChatMessage], state: Mapping[str, Any], **texts: str) -> dict[str, str]:
        """Texts for the placeholders: question and reference of a row, and those given.

        Raises:
            UnusableRow: The row's question is no text, or it has no reference answer.
        """
        found = {"question": question_of(log, state), **texts}
        return {**found, "reference": reference_of(state)} if self._has_reference else found

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[tuple[Ask, str]]:
        """A function that asks, and the name of the model.

        The function returns `text`, what the judge wrote, `verdict` and `score`, None if its text has none, and `cut`
        if it had no end. It raises ServerFailed if the judge could not be asked.

        Raises:
            ServerFailed: The server does not say which models it has.
        """
        async with self._server.opened() as (client, model):
            yield functools.partial(self._ask, client, model), model

    async def _ask(self, client: ModelClient, model: str, texts: Mapping[str, str]) -> dict[str, Any]:
        config, form = self._config, self._form
        content = prompts.filled(config.prompt, texts, form.request)
        messages = [{"role": "system", "content": config.system}] if config.system else []
        body: dict[str, Any] = {
            "model": model,
            "messages": [*messages, {"role": "user", "content": content}],
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
            **config.request,
        }
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
            raise ServerUnavailable(f"the judge's answer is not a chat completion: {str(answer)[:500]}") from error
        if not isinstance(text, str):
            raise ServerUnavailable(f"the judge's answer has no text: {str(answer)[:500]}")
        return self.read(text, cut=cut)

    def read(self, text: str, *, cut: bool = False) -> dict[str, Any]:
        """What a judge's text says, as the function of `opened` returns it."""
        # A text that was cut has not come to its verdict, even if it names one on the way.
        verdict = None if cut else self._form.read(text)
        return {
            "text": text if len(text) <= MAX_SAID else f"{text[:MAX_SAID]}…",
            "verdict": None if verdict is None else verdict.label,
            "score": None if verdict is None else verdict.score,
            **({"cut": True} if cut else {}),
        }
