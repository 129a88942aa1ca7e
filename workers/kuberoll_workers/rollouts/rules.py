"""The arithmetic of windows and the names of endings: decisions only, no state."""

from __future__ import annotations

from kuberoll_workers.data.record import StopReason


def prompt_fills_window(prompt: int, max_sequence_length: int) -> bool:
    """Whether a prompt of so many tokens leaves no room for a generated one; such a prompt is never sent."""
    return prompt >= max_sequence_length


def generation_room(prompt: int, max_tokens: int, max_sequence_length: int) -> int:
    """Tokens that may be generated after a prompt of so many."""
    return max(0, min(max_tokens, max_sequence_length - prompt))


def observation_room(prompt: int, generated: int, observation: int, max_sequence_length: int) -> tuple[int, bool]:
    """How many of an observation's tokens are kept, and whether the trajectory is truncated by it.

    Filling the window exactly is an overflow, although nothing is cut: no token could follow. The rule is NeMo RL's
    (`run_multi_turn_rollout`); the clamp at 0 is ours, where its first version kept wrong tokens and its second one
    stopped the batch.
    """
    if observation + generated + prompt < max_sequence_length:
        return observation, False
    return min(observation, max(0, max_sequence_length - generated - prompt)), True


def stop_reason(
    *, terminated: bool, response_truncated: bool, context_truncated: bool, turns: int, max_turns: int
) -> StopReason | None:
    """How a trajectory ended, or None when it goes on; exactly one reason each.

    A response that was cut is no proper end, even where the environment judged it and ended the episode. An
    observation that was cut after the environment ended the episode does not matter any more.
    """
    if response_truncated:
        return "truncated"
    if terminated:
        return "terminated"
    if context_truncated:
        return "truncated"
    return "max_turns" if turns >= max_turns else None
