"""An environment played in the terminal: its prompts and observations as text, the player's responses from lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kuberoll_workers.authoring.instance import CallFailed, Instance, Play, Script, json_text
from kuberoll_workers.data.observations import ObservationRefused, ObservationTemplate
from kuberoll_workers.data.text import visible
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.data.tools import Tool
from kuberoll_workers.data.tracebacks import excerpt
from kuberoll_workers.dataset.rows import Row
from kuberoll_workers.environments.outcome import StepOutcome

COMMANDS = {
    ":state": "the episode's metadata",
    ":restart": "begin again",
    ":help": "these commands",
    ":quit": "end",
}
"""Commands by their first line of a response."""

_TOOL_CHARACTERS = 4000

Write = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """How a model sees a chat.

    Attributes:
        tokenizer: Whose chat template is used; None: messages are shown by role.
        observations: How observations are appended.
    """

    tokenizer: HuggingFaceTokenizer | None = None
    observations: ObservationTemplate | None = None

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] | None = None) -> str:
        """Text of a prompt, with its tools.

        Raises:
            Exception: The chat template rejects it.
        """
        if self.tokenizer is not None:
            return self.tokenizer.chat_text(messages, generation_prompt=True, tools=tools)
        shown = [
            f"[tool {number}]\n{json_text(tool['function'], _TOOL_CHARACTERS)}"
            for number, tool in enumerate(tools or (), start=1)
        ]
        return "\n".join([*shown, *(f"[{message['role']}]\n{_content(message)}" for message in messages)])

    def observation(self, play: Play) -> str:
        """Text of the newest observation."""
        outcome = play.outcomes[-1]
        if self.tokenizer is None or self.observations is None:
            return _observation(outcome)
        response = self.tokenizer.encode(play.script.responses[len(play.outcomes) - 1])
        ids = self.observations.render_messages(
            outcome.observation, previous=response, generation_prompt=not outcome.terminated
        )
        return self.tokenizer.decode_with_special_tokens(ids)


class Session:
    """One row that is played until the player quits or there are no more lines."""

    def __init__(
        self, instance: Instance, row: Row, *, seed: int, max_turns: int, rendering: Rendering, write: Write
    ) -> None:
        """`write` prints one text, which may have several lines."""
        self._instance = instance
        self._row = row
        self._seed = seed
        self._max_turns = max_turns
        self._rendering = rendering
        self._write = write
        self._stops: Sequence[str] = ()

    def run(self, lines: Iterator[str]) -> bool:
        """Play; returns False if a call of the environment failed.

        Args:
            lines: What the player writes, each with its newline.
        """
        play = self._begin()
        while play is not None:
            response = self._read(lines)
            if response is None or response == ":quit":
                self._close(play)
                return True
            if response == ":restart":
                self._close(play)
                play = self._begin()
            elif response == ":state":
                self._write(json.dumps(play.metadata, ensure_ascii=False, indent=2))
            elif response == ":help":
                self._write("\n".join(f"{name:<9} {text}" for name, text in COMMANDS.items()))
            elif play.ended:
                self._write("the episode is over: :restart or :quit")
            elif not self._step(play, response):
                self._close(play)
                return False
        return False

    def _begin(self) -> Play | None:
        script = Script("play", self._row, ("",) * self._max_turns, self._seed)
        try:
            [play] = self._instance.begin([script])
        except CallFailed as failed:
            self._fail(failed)
            return None
        stops = play.start.stop_strings if play.start.stop_strings is not None else self._row.stop_strings
        try:
            text = self._rendering.prompt(play.log, play.tools)
        except Exception as error:
            # A template is foreign code, and raises anything.
            self._write(f"the chat template rejects the prompt: {type(error).__name__}: {error}")
            return None
        self._write(f"--- prompt of {self._row.where}")
        self._write(text)
        self._prepare(stops or ())
        return play

    def _prepare(self, stops: Sequence[str]) -> None:
        self._stops = stops
        ends = [*map(repr, stops), "an empty line"]
        how = "one line" if "\n" in stops else f"ends with {' or '.join(ends)}"
        self._write(f"--- your response ({how}; :help)")

    def _read(self, lines: Iterator[str]) -> str | None:
        """The next response, or a command; None at the end of the lines."""
        text = ""
        for line in lines:
            if not text and line.strip() in COMMANDS:
                return line.strip()
            text += line
            ends = [text.find(stop) + len(stop) for stop in self._stops if stop in text]
            if ends:
                # As an engine stops: nothing follows the stop string.
                return text[: min(ends)]
            if not line.strip():
                return text.removesuffix(line).removesuffix("\n")
        return text.removesuffix("\n") if text else None

    def _step(self, play: Play, response: str) -> bool:
        played = len(play.outcomes)
        responses = list(play.script.responses)
        responses[played] = response
        play.script = Script(play.script.id, self._row, tuple(responses), self._seed)
        try:
            self._instance.step([play])
        except CallFailed as failed:
            self._fail(failed)
            return False
        outcome = play.outcomes[-1]
        for call in play.calls("tool_calls"):
            self._write(f"--- call {call['function']['name']}({call['function']['arguments']})")
        for call in play.calls("invalid_tool_calls"):
            self._write(f"--- a call that cannot be read: {call['error']}")
        self._write(f"--- turn {played + 1}: observation ({outcome.role})")
        try:
            text = self._rendering.observation(play)
        except ObservationRefused as error:
            text = f"{_observation(outcome)}\n--- the chat template refuses it: {error}"
        self._write(text or "(empty)")
        self._write(f"--- reward {outcome.reward:g}{_parts(outcome.reward_parts)}, {play.reward:g} in all")
        if outcome.answer is not None:
            self._write(f"--- answer {outcome.answer!r}")
        if not play.ended:
            self._prepare(outcome.stop_strings or ())
        elif outcome.terminated:
            self._write(f"--- the episode ended: reward {play.reward:g} after {_turns(played + 1)} (:restart, :quit)")
        else:
            self._write(f"--- {_turns(played + 1)}, the limit: reward {play.reward:g} (:restart, :quit)")
        return True

    def _close(self, play: Play) -> None:
        ended = bool(play.outcomes) and play.outcomes[-1].terminated
        try:
            self._instance.close([play.end("terminated" if ended else "interrupted")])
        except CallFailed as failed:
            self._fail(failed)

    def _fail(self, failed: CallFailed) -> None:
        self._write(str(failed))
        for line in excerpt(failed.traceback.frames) if failed.traceback is not None else ():
            self._write(f"  {line}")


def clean(text: str) -> str:
    """A text for the terminal, without control characters, which a policy's or an environment's text may have."""
    return visible(text).rstrip("\n")


def _observation(outcome: StepOutcome) -> str:
    if not outcome.messages:
        return outcome.content
    return "\n".join(f"[{message['role']}] {message['content']}" for message in outcome.messages)


def _content(message: Mapping[str, Any]) -> str:
    calls = message.get("tool_calls", ())
    return "\n".join([message["content"], *(f"calls {json_text(call['function'])}" for call in calls)])


def _parts(parts: Mapping[str, float]) -> str:
    return f" ({', '.join(f'{name} {value:g}' for name, value in parts.items())})" if parts else ""


def _turns(count: int) -> str:
    return f"{count} turn{'s' * (count != 1)}"
