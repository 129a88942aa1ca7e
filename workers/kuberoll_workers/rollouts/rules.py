"""Rules of the context window and of stop reasons, as pure functions."""

from __future__ import annotations

from kuberoll_workers.data.stop_reasons import StopReason


def prompt_fills_window(prompt: int, max_sequence_length: int) -> bool:
    """True if a prompt of this many tokens leaves no room for generation; such a prompt is never sent."""
    return prompt >= max_sequence_length


def generation_room(prompt: int, max_tokens: int, max_sequence_length: int) -> int:
    """Maximum number of tokens to generate after a prompt of `prompt` tokens."""
    return max(0, min(max_tokens, max_sequence_length - prompt))


def observation_room(prompt: int, generated: int, observation: int, max_sequence_length: int) -> tuple[int, bool]:
    """Number of an observation's tokens to keep, and whether the observation truncates the trajectory.

    Filling the window exactly counts as truncation although nothing is cut, because no token could follow. The rule is
    NeMo RL's (`run_multi_turn_rollout`); the clamp at 0 is ours: its first version kept wrong tokens there, and its
    second one stopped the batch.
    """
    if observation + generated + prompt < max_sequence_length:
        return observation, False
    return min(observation, max(0, max_sequence_length - generated - prompt)), True


def stop_reason(
    *, terminated: bool, response_truncated: bool, context_truncated: bool, turns: int, max_turns: int
) -> StopReason | None:
    """The stop reason of a trajectory, or None if it continues.

    A truncated response takes precedence, even if the environment judged it and ended the episode. Truncation of an
    observation does not matter once the environment has ended the episode.
    """
    if response_truncated:
        return "truncated"
    if terminated:
        return "terminated"
    if context_truncated:
        return "truncated"
    return "max_turns" if turns >= max_turns else None
