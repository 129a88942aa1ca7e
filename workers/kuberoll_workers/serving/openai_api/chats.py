"""Conversion of chats to token ids, with a memory that keeps later turns token-exact."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kuberoll_workers.data.messages import token_array
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer, load_tokenizer
from kuberoll_workers.serving.openai_api.requests import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SESSION_ENTRIES = 256
_CHARACTERS = 32 << 20


class ChatFormat:
    """A model's tokenizer and chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._plain = HuggingFaceTokenizer(tokenizer)

    @classmethod
    def load(cls, source: str, *, revision: str | None = None) -> ChatFormat:
        """Load from a directory or the hub.

        Raises:
            OSError, ValueError: transformers' own, when there is no tokenizer.
        """
        return cls(load_tokenizer(source, revision=revision))

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        generation_prompt: bool,
        continued: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Render a chat with the model's template.

        Args:
            continued: Leave the last message open for generation.
            variables: Further variables of the template.

        Raises:
            InvalidRequest: There is no template, it rejects the messages, or it leaves the tools out.
        """

        def render(offered: Sequence[Mapping[str, Any]] | None) -> str:
            return self._render(
                messages, offered, generation_prompt=generation_prompt, continued=continued, variables=variables
            )

        text = render(tools)
        if tools and text == render(None):
            raise InvalidRequest(
                "tools: the model's chat template leaves them out, so the model would not see them; "
                "describe them in a message, or use a model whose template renders tools",
                param="tools",
            )
        return text

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        generation_prompt: bool,
        continued: bool,
        variables: Mapping[str, Any],
    ) -> str:
        from jinja2.exceptions import TemplateError

        try:
            text: Any = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if not tools else [dict(tool) for tool in tools],
                add_generation_prompt=generation_prompt,
                continue_final_message=continued,
                tokenize=False,
                **variables,
            )
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise InvalidRequest(
                f"messages: the model's chat template rejects them: {error}", param="messages"
            ) from error
        return str(text)

    def encode(self, text: str, *, special_tokens: bool = False) -> array[int]:
        """Encode a text.

        Args:
            special_tokens: Add the special tokens that the tokenizer puts around a text.
        """
        if special_tokens:
            return token_array(self._tokenizer.encode(text, add_special_tokens=True))
        return self._plain.encode(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Decode token ids."""
        if skip_special_tokens:
            return self._plain.decode(ids)
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


class ChatMemory:
    """A cache of generated chats, so that the next turn of a chat begins with the sampled token ids.

    Clients send a chat back as text, which may encode to other ids than were sampled. If a chat's text begins with a
    remembered one, its ids begin with the remembered ids. The oldest sessions beyond some 32 million characters are
    forgotten, and their chats are encoded like any text.
    """

    def __init__(self, *, characters: int = _CHARACTERS, entries: int = _SESSION_ENTRIES) -> None:
        """Set the limits: characters of all sessions together, entries of each session."""
        self._sessions: OrderedDict[str, OrderedDict[str, array[int]]] = OrderedDict()
        self._most_characters = characters
        self._most_entries = entries
        self.characters = 0

    def remember(self, session: str, text: str, ids: array[int]) -> None:
        """Store the ids of a text, which is a chat up to the end of a response."""
        texts = self._sessions.setdefault(session, OrderedDict())
        self._sessions.move_to_end(session)
        if text not in texts:
            self.characters += len(text)
        texts[text] = ids
        texts.move_to_end(text)
        while len(texts) > self._most_entries:
            self._forget(texts)
        while self.characters > self._most_characters and self._sessions:
            oldest = next(iter(self._sessions))
            self._forget(self._sessions[oldest])
            if not self._sessions[oldest]:
                del self._sessions[oldest]

    def longest_prefix(self, session: str, text: str) -> tuple[int, array[int]]:
        """Find the longest remembered prefix of a text; return its length in characters, 0 if none, and its ids."""
        length, ids = 0, token_array()
        for known, known_ids in self._sessions.get(session, {}).items():
            if len(known) > length and text.startswith(known):
                length, ids = len(known), known_ids
        if length:
            self._sessions.move_to_end(session)
        return length, ids

    def _forget(self, texts: OrderedDict[str, array[int]]) -> None:
        text, _ = texts.popitem(last=False)
        self.characters -= len(text)
