"""Hugging Face tokenizers for the loop."""

from __future__ import annotations

import difflib
import os
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import orjson

from kuberoll_workers.data.chat_template import compiled, stopped_clock, template_variables
from kuberoll_workers.data.messages import token_array
from kuberoll_workers.data.tokenization import LONG_TEXT, TemplateRefused
from kuberoll_workers.data.tokenizer_files import FileTokenizer, read_tokenizer, tokenizer_directory
from kuberoll_workers.data.tools import template_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_FIELD = "spec.generation.model.chatTemplate"
# Two chats that differ in the content of their last message, without and with a message of the system.
_WORDS = ("quartz", "velvet")
_BEFORE: tuple[list[dict[str, str]], ...] = ([], [{"role": "system", "content": "lemon"}])
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}


def load_tokenizer(source: str, *, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer from a directory or the hub.

    Raises:
        OSError, ValueError: transformers' own, when there is no tokenizer.
    """
    # Without PyTorch, as in the worker image, transformers recommends it; tokenizers do not need it.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    # Use the process's own log handlers: a pod's log is JSON lines, and transformers' handler writes plain text.
    transformers.logging.disable_default_handler()
    transformers.logging.enable_propagation()
    found: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(source, revision=revision)
    return found


def check_compiles(template: str) -> None:
    """Check that a job's chat template is Jinja.

    Raises:
        TemplateRefused: It is not; the message has the line.
    """
    import jinja2

    try:
        compiled(template)
    except jinja2.TemplateSyntaxError as error:
        # Without the cause, here and below: one that is not known as lasting would have a pod tried again.
        raise TemplateRefused(f"{_FIELD}: it is not Jinja: line {error.lineno}: {error.message}") from None
    except Exception as error:
        # Of Python's own compiler, for what is nested too deeply.
        raise TemplateRefused(f"{_FIELD}: it cannot be compiled: {type(error).__name__}: {error}") from None


class HuggingFaceTokenizer:
    """A model's own tokenizer: transformers', or one that was read from the same files."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | FileTokenizer,
        *,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            template: Chat template in place of the tokenizer's own, as Jinja source.
            variables: Variables of the chat template, whenever a chat is rendered.
        """
        self._tokenizer = tokenizer
        self._template = template
        self._variables = dict(variables or {})
        # The Rust tokenizer avoids transformers' per-call padding and batching, and is 5 to 10 times faster.
        plain = tokenizer.is_fast and not getattr(tokenizer, "clean_up_tokenization_spaces", False)
        self._rust = tokenizer.backend_tokenizer if plain else None
        self._backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        # Known after the first chat with tools.
        self._renders_tools = False

    @classmethod
    def load(cls, source: str, *, revision: str | None = None) -> HuggingFaceTokenizer:
        """Load from a directory or the hub; without transformers where the files say all.

        Raises:
            OSError, ValueError: transformers' own, when there is no tokenizer.
        """
        directory = tokenizer_directory(source, revision)
        found = None if directory is None else read_tokenizer(directory)
        return cls(load_tokenizer(source, revision=revision) if found is None else found)

    def with_template(self, template: str | None) -> HuggingFaceTokenizer:
        """The same tokenizer, with a job's chat template in place of its own; None: its own.

        Raises:
            TemplateRefused: The template is not Jinja.
        """
        if template is None:
            return self
        check_compiles(template)
        return HuggingFaceTokenizer(self._tokenizer, template=template, variables=self._variables)

    def check_rendering(self) -> None:
        """Check that a job's chat template, if there is one, renders a user's message.

        Raises:
            TemplateRefused: It fails with such a chat, or leaves the message's content out.
        """
        if self._template is None:
            return
        problem = None
        for before in _BEFORE:
            chats = [[*before, {"role": "user", "content": word}] for word in _WORDS]
            try:
                one, other = (self.chat_text(chat, generation_prompt=True) for chat in chats)
            except Exception as error:
                # Templates raise anything; some want a message of the system.
                problem = problem or f"it cannot render a user's message: {type(error).__name__}: {error}"
                continue
            if one != other:
                return
            raise TemplateRefused(
                f"{_FIELD}: it leaves out what a user's message says; write {{{{ message.content }}}}, a text, in a "
                "loop over messages"
            )
        raise TemplateRefused(f"{_FIELD}: {problem}")

    def check_tools(self) -> None:
        """Check that the chat template renders tools.

        Raises:
            TemplateRefused: It leaves them out.
        """
        try:
            self.chat_text([{"role": "user", "content": _WORDS[0]}], generation_prompt=True, tools=[_PROBE_TOOL])
        except TemplateRefused:
            raise
        except Exception:
            # One that takes no such chat may take others.
            return

    def with_variables(self, variables: Mapping[str, Any]) -> HuggingFaceTokenizer:
        """The same tokenizer, whose chat template is rendered with further variables.

        Raises:
            TemplateRefused: The template has no such variable, so it would be ignored.
        """
        if not variables:
            return self
        own = getattr(self._tokenizer, "chat_template", None)
        known = template_variables(own if self._template is None else self._template)
        whose = "the model's chat template" if self._template is None else f"the job's chat template ({_FIELD})"
        for name in variables:
            if known is not None and name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise TemplateRefused(
                    f"spec.generation.model.chatTemplateKwargs.{name}: {whose} has no such variable, "
                    f"and would ignore it{hint}"
                )
        return HuggingFaceTokenizer(
            self._tokenizer, template=self._template, variables={**self._variables, **variables}
        )

    def with_clock(self, moment: datetime) -> HuggingFaceTokenizer:
        """The same tokenizer, whose chat template reads this time wherever it asks for the present one."""
        # In place of the global function of that name.
        variables = {**self._variables, "strftime_now": stopped_clock(moment)}
        return HuggingFaceTokenizer(self._tokenizer, template=self._template, variables=variables)

    @property
    def vocabulary(self) -> int:
        """Number of token ids, including added ones; all ids are below it."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return max(len(self._tokenizer), 1 + max(added, default=-1))

    def encode(self, text: str) -> array[int]:
        if not text:
            return token_array()
        if self._rust is not None:
            if len(text) > LONG_TEXT:
                # A batch is encoded without the interpreter's lock, so other threads continue.
                return token_array(self._rust.encode_batch([text], add_special_tokens=False)[0].ids)
            return token_array(self._rust.encode(text, add_special_tokens=False).ids)
        return token_array(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        if self._rust is not None:
            return str(self._rust.decode(list(ids), skip_special_tokens=True))
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def decode_with_special_tokens(self, ids: Sequence[int]) -> str:
        if self._rust is not None:
            return str(self._rust.decode(list(ids), skip_special_tokens=False))
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> array[int]:
        return token_array(self._rendered(messages, tools, generation_prompt=True, tokenize=True))

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        return str(self._rendered(messages, tools, generation_prompt=generation_prompt, tokenize=False))

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        generation_prompt: bool,
        tokenize: bool,
    ) -> Any:
        chat = template_messages(messages)
        # Not every class of transformers takes one.
        own = {} if self._template is None else {"chat_template": self._template}

        def render(offered: Sequence[Mapping[str, Any]] | None, *, tokenize: bool) -> Any:
            return self._tokenizer.apply_chat_template(
                chat,
                tools=None if not offered else [dict(tool) for tool in offered],
                add_generation_prompt=generation_prompt,
                tokenize=tokenize,
                return_dict=False,
                **own,
                **self._variables,
            )

        if tools and not self._renders_tools:
            if render(tools, tokenize=False) == render(None, tokenize=False):
                raise TemplateRefused(
                    "tools: the chat template leaves them out, so the policy would not see them: use a model whose "
                    "template renders tools, write one that does in generation.model.chatTemplate, or describe the "
                    "tools in a message"
                )
            self._renders_tools = True
        return render(tools, tokenize=tokenize)

    def added_tokens(self) -> dict[int, bool]:
        decoder: Mapping[int, Any] = getattr(self._tokenizer, "added_tokens_decoder", {})
        return {token: bool(added.special) for token, added in decoder.items()}

    def encode_with_spans(self, text: str) -> tuple[array[int], list[tuple[int, int]]]:
        if self._backend is None:
            raise NotImplementedError("only Rust tokenizers report the positions of tokens")
        encoding = self._backend.encode(text, add_special_tokens=False)
        return token_array(encoding.ids), encoding.offsets

    def encoder_without(self, tokens: Collection[int]) -> Callable[[str], array[int]] | None:
        if self._backend is None:
            return None
        from tokenizers import Tokenizer as RustTokenizer

        # A second tokenizer, because special tokens are a global setting, and other threads encode at the same time.
        state = orjson.loads(self._backend.to_str())
        for added in state["added_tokens"]:
            added["special"] = added["id"] in tokens
        blind = RustTokenizer.from_str(orjson.dumps(state).decode())
        blind.encode_special_tokens = True
        return lambda text: token_array(blind.encode(text, add_special_tokens=False).ids)
