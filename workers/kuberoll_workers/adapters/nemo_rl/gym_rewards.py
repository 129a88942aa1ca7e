"""Changes to the rewards of NeMo Gym's rollouts that NeMo RL has settings for: effort levels and penalties."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from kuberoll_workers.adapters.nemo_rl.gym_rows import GymRollout
from kuberoll_workers.adapters.nemo_rl.message_logs import TOKEN_IDS

THINKING_TAGS = ("<think>", "</think>")


def shape_by_effort(rows: Sequence[Mapping[str, Any]], rollouts: Sequence[GymRollout], effort: Any) -> dict[str, float]:
    """Change the rewards of prompts that ask for little effort by the lengths of their last responses.

    For a prompt whose last user message has `low_string`, the reward r becomes
    `r + r * max(l, 0) + low_penalty * min(l, 0)`, where `l = min(1, low_weight * (1 - length / low_ub))`.

    Args:
        rows: NeMo Gym's rows, one for each rollout.
        effort: `low_weight`, `low_penalty`, `low_ub` (tokens) and `low_string`, as a mapping or an object; nothing is
            changed if it is None, or has no weight or text.

    Returns:
        Metrics `mean_length_reward_low`, `mean_reward_low`, and `mean_length_…` and `median_length_…` of `low` and
        `high`; those that have samples.
    """
    weight, text = _setting(effort, "low_weight", 0.0), _setting(effort, "low_string", "")
    if effort is None or weight <= 0 or not text:
        return {}
    penalty, bound = _setting(effort, "low_penalty", 1.0), _setting(effort, "low_ub", 64000)
    values: dict[str, list[float]] = {"length_reward_low": [], "reward_low": [], "length_low": [], "length_high": []}
    for row, rollout in zip(rows, rollouts, strict=True):
        length = len(rollout.responses[-1])
        if text not in _last_user_text(row):
            values["length_high"].append(length)
            continue
        bonus = min(1.0, weight * (1.0 - length / bound))
        _set_reward(rollout, rollout.reward * (1 + max(bonus, 0.0)) + penalty * min(bonus, 0.0), "effort_config")
        values["length_reward_low"].append(bonus)
        values["reward_low"].append(rollout.reward)
        values["length_low"].append(length)
    metrics = {f"mean_{name}": statistics.fmean(found) for name, found in values.items() if found}
    metrics |= {
        f"median_{name}": float(statistics.median(found))
        for name, found in values.items()
        if found and name in ("length_low", "length_high")
    }
    return metrics


class Penalties:
    """Faults of responses that set a reward to 0, by NeMo RL's `reward_penalty_config`."""

    def __init__(self, config: Any, tokenizer: Any, thinking_tags: Sequence[str] | None = None) -> None:
        """
        Args:
            config: Flags `penalize_duplicated_reasoning`, `penalize_empty_final_answer`, `penalize_unwanted_tokens`,
                `penalize_malformed_think_tag`; `token_ids` with `unwanted`, `think_open`, `think_close`; and
                `thinking_tags`. A mapping or an object; None: no penalties.
            tokenizer: Its `encode` finds the ids of thinking tags that are one token each.
            thinking_tags: The opening and the closing tag; instead of the configuration's.

        Raises:
            ValueError: Ids or tags are missing; the message names the setting.
        """
        self._tests: dict[str, Callable[[GymRollout], bool]] = {}
        ids = _setting(config, "token_ids", None)
        if _setting(config, "penalize_duplicated_reasoning", False):
            self._tests["reasoning_equal_to_final_answer_rate"] = _repeats_reasoning
        if _setting(config, "penalize_empty_final_answer", False):
            self._tests["empty_final_answer_rate"] = _ends_empty
        if _setting(config, "penalize_unwanted_tokens", False):
            found = _setting(ids, "unwanted", None)
            unwanted = {found} if isinstance(found, int) else {int(token) for token in found or ()}
            if not unwanted:
                raise ValueError("reward_penalties.token_ids.unwanted must be set if penalize_unwanted_tokens is true")
            self._tests["unwanted_token_rate"] = lambda rollout: any(
                not unwanted.isdisjoint(response.tolist()) for response in rollout.responses
            )
        if _setting(config, "penalize_malformed_think_tag", False):
            tags = tuple(thinking_tags or _setting(config, "thinking_tags", None) or THINKING_TAGS)
            if len(tags) < 2:
                raise ValueError("reward_penalties.thinking_tags must have an opening and a closing tag")
            pair = _tag_ids(ids, tags, tokenizer)
            self._tests["malformed_think_tag_rate"] = lambda rollout: _misuses_tags(rollout, tags, pair)

    def apply(self, rollouts: Sequence[GymRollout]) -> dict[str, float]:
        """Set the rewards of faulty rollouts to 0; return the share of each fault that is penalized, by its metric."""
        rates = {}
        for name, is_faulty in self._tests.items():
            faulty = [rollout for rollout in rollouts if is_faulty(rollout)]
            for rollout in faulty:
                _set_reward(rollout, 0.0, "reward_penalty_config")
            if rollouts:
                rates[name] = len(faulty) / len(rollouts)
        return rates


def _set_reward(rollout: GymRollout, reward: float, setting: str) -> None:
    if rollout.reward_components and reward != rollout.reward:
        raise ValueError(
            f"{setting} would change the reward {rollout.reward} to {reward}, which is no longer the sum of "
            "its reward_components; use one of the two"
        )
    rollout.reward = rollout.full_result["reward"] = reward


def _setting(config: Any, name: str, default: Any) -> Any:
    found = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return default if found is None else found


def _last_user_text(row: Mapping[str, Any]) -> str:
    given = row["responses_create_params"].get("input") or ()
    if isinstance(given, str):
        return given
    messages = [message for message in given if message.get("role") == "user" and "content" in message]
    return _text(messages[-1]["content"]) if messages else ""


def _text(content: Any) -> str:
    """A message's text: a string, or a list of parts."""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text") or "") for part in content or () if isinstance(part, Mapping))


def _items(rollout: GymRollout) -> list[Mapping[str, Any]]:
    return list((rollout.full_result.get("response") or {}).get("output") or ())


def _repeats_reasoning(rollout: GymRollout) -> bool:
    """True if an answer is exactly the reasoning before it."""
    for item, following in pairwise(_items(rollout)):
        reasoning = _first_text(item.get("summary")) if item.get("type") == "reasoning" else ""
        if reasoning and reasoning == _first_text(following.get("content")):
            return True
    return False


def _ends_empty(rollout: GymRollout) -> bool:
    """True if the last message is empty or missing, except where the last item is a tool call."""
    items = _items(rollout)
    if items and items[-1].get("type") == "function_call":
        return False
    for item in reversed(items):
        content = item.get("content")
        if isinstance(content, str) or (isinstance(content, list) and content and "text" in content[0]):
            return not _first_text(content)
    return True


def _first_text(parts: Any) -> str:
    if isinstance(parts, str):
        return parts.strip()
    return str(parts[0].get("text") or "").strip() if isinstance(parts, list) and parts else ""


def _misuses_tags(rollout: GymRollout, tags: Sequence[str], ids: tuple[int, int] | None) -> bool:
    if any(message.get("has_malformed_thinking") for message in rollout.message_log):
        return True
    if ids is not None and any(_is_unbalanced(*pair, ids) for pair in _turns(rollout)):
        return True
    # The model may also spell a tag with ordinary tokens.
    texts = [str(item.get("generation_str") or "") for item in _items(rollout)]
    return any(text.count(tags[0]) > 0 or text.count(tags[1]) > 1 for text in texts)


def _turns(rollout: GymRollout) -> Iterator[tuple[list[int], list[int]]]:
    for prompt, response in zip(rollout.message_log[::2], rollout.message_log[1::2], strict=True):
        yield prompt[TOKEN_IDS].tolist(), response[TOKEN_IDS].tolist()


def _is_unbalanced(prompt: list[int], response: list[int], ids: tuple[int, int]) -> bool:
    opening, closing = ids
    open_tags = prompt.count(opening) - prompt.count(closing)
    # A prompt that ends with an opening tag has the response close it; one without thinking has both or none.
    return open_tags not in (0, 1) or response.count(opening) != 0 or response.count(closing) != open_tags


def _tag_ids(ids: Any, tags: Sequence[str], tokenizer: Any) -> tuple[int, int] | None:
    """Ids of the tags, from the configuration or the tokenizer; None if they are not one token each."""
    names = ("think_open", "think_close")
    given = [_setting(ids, name, None) for name in names]
    found = [
        _single_token(tokenizer, tag) if token is None else int(token) for token, tag in zip(given, tags, strict=False)
    ]
    if found[0] is not None and found[1] is not None:
        return found[0], found[1]
    if any(token is not None for token in given):
        raise ValueError("reward_penalties.token_ids.think_open and think_close must both be set")
    return None


def _single_token(tokenizer: Any, text: str) -> int | None:
    encoded = tokenizer.encode(text, add_special_tokens=False)
    return int(encoded[0]) if len(encoded) == 1 else None
