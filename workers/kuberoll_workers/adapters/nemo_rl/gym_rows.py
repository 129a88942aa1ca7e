"""Rows that go to NeMo Gym through NeMo RL's actor, and the checks of what comes back."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kuberoll_workers.adapters.nemo_gym_results import (
    check_components,
    is_cut,
    reported_failure,
    reward_components,
    reward_of,
)
from kuberoll_workers.adapters.nemo_rl.message_logs import TOKEN_IDS, MessageLog, token_ids_of
from kuberoll_workers.environments.outcome import StepInvalid

if TYPE_CHECKING:
    import torch

LOGPROBS = "generation_logprobs"
TASK_INDEX = "_ng_task_index"
"""Field of a row that identifies its prompt."""

_ROW_INDEX = "_rowidx"


@dataclass(slots=True)
class GymRollout:
    """One finished rollout.

    Attributes:
        message_log: A user and an assistant message for each turn: int64 `token_ids`, and the assistant's also float32
            `generation_logprobs`, one for each id. Tools' answers are in the next user message.
        full_result: What the agent returned, without token ids.
        reward: Total reward; shaping and penalties change it here and in `full_result`.
        truncated: The sequence fills the engine's window, or the last response was cut.
    """

    message_log: MessageLog
    full_result: dict[str, Any]
    reward: float
    truncated: bool

    @property
    def responses(self) -> list[torch.Tensor]:
        """Token ids of the assistant's messages."""
        return [message[TOKEN_IDS] for message in self.message_log if message["role"] == "assistant"]

    @property
    def turns(self) -> int:
        return len(self.responses)

    @property
    def tokens(self) -> int:
        return sum(len(message[TOKEN_IDS]) for message in self.message_log)

    @property
    def generated(self) -> int:
        return sum(map(len, self.responses))

    @property
    def longest_response(self) -> int:
        return max(map(len, self.responses))

    @property
    def mask_sample(self) -> bool:
        """True if the agent asks for this sample to be left out of the loss."""
        return bool((self.full_result.get("instance_config") or {}).get("mask_sample", False))

    @property
    def reward_components(self) -> dict[str, float]:
        return reward_components(self.full_result)


def prepared_rows(
    rows: Sequence[Any], *, temperature: float, top_p: float, max_new_tokens: int
) -> list[dict[str, Any]]:
    """Copies of the rows with sampling parameters, and their number as `_rowidx`.

    A row's own `max_output_tokens` stays if it is lower.

    Raises:
        TypeError: A row lacks `responses_create_params`, or its agent's name.
    """
    prepared = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping) or not isinstance(row.get("responses_create_params"), Mapping):
            raise TypeError(f"extra_env_info[{number}]: a row of NeMo Gym must have a mapping responses_create_params")
        agent = row.get("agent_ref")
        if not isinstance(agent, Mapping) or not isinstance(agent.get("name"), str):
            raise TypeError(
                f"extra_env_info[{number}].agent_ref: a row of NeMo Gym must name its agent, agent_ref.name"
            )
        own = copy.deepcopy(dict(row))
        parameters = own["responses_create_params"]
        limit = parameters.get("max_output_tokens")
        parameters |= {
            "temperature": temperature,
            "top_p": top_p,
            "max_output_tokens": max_new_tokens if limit is None else min(limit, max_new_tokens),
        }
        own[_ROW_INDEX] = number
        prepared.append(own)
    return prepared


def task_index_of(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The prompt's `_ng_task_index` that the rows of a group share; None if the first has none.

    Raises:
        ValueError: They differ.
    """
    found = [row.get(TASK_INDEX) for row in rows]
    if not found or found[0] is None:
        return None
    if len(set(found)) != 1:
        raise ValueError(f"the rows of one prompt group must have one {TASK_INDEX}; found {found}")
    return int(found[0])


def read_rollout(result: Any, *, window: int) -> GymRollout:
    """Check a result of the actor and convert its tokens; the result is not changed.

    Args:
        result: `message_log`, `input_message_log` (its first messages) and `full_result`, as the actor returns them.
        window: Maximum number of tokens of a sequence, by the engine's configuration.

    Raises:
        StepInvalid: The result cannot be trained on, or is a failure that NeMo Gym reports.
        RowFault: The same, and NeMo Gym reports that a retry would not help.
    """
    full = result.get("full_result") if isinstance(result, Mapping) else None
    if not isinstance(full, Mapping) or not isinstance(result.get("message_log"), Sequence):
        raise StepInvalid("NeMo Gym's actor returned no mapping with message_log and full_result")
    if (failure := reported_failure(full)) is not None:
        raise failure
    log = _message_log(result["message_log"])
    _check_prompt(result.get("input_message_log"), log)
    reward = reward_of(full, "full_result")
    rollout = GymRollout(log, copy.deepcopy(dict(full)), reward, truncated=False)
    rollout.truncated = rollout.tokens >= window or is_cut(full)
    check_components(full, reward, "full_result")
    return rollout


def _message_log(messages: Sequence[Any]) -> MessageLog:
    if not messages:
        raise StepInvalid("message_log is empty: the policy generated nothing")
    log = []
    for at, message in enumerate(messages):
        where, role = f"message_log[{at}]", "assistant" if at % 2 else "user"
        if not isinstance(message, Mapping) or message.get("role") != role:
            raise StepInvalid(f"{where}: expected a message of the {role}; user and assistant take turns")
        try:
            ids = token_ids_of(message[TOKEN_IDS])
        except (KeyError, TypeError, ValueError) as error:
            raise StepInvalid(f"{where}.token_ids: {error}") from error
        entry = {**message, TOKEN_IDS: ids}
        if role == "assistant":
            entry[LOGPROBS] = _logprobs(message.get(LOGPROBS), len(ids), where)
        log.append(entry)
    if len(log) % 2:
        raise StepInvalid("message_log ends with a prompt that has no response")
    return log


def _logprobs(given: Any, length: int, where: str) -> torch.Tensor:
    import torch

    if given is None:
        raise StepInvalid(f"{where}.{LOGPROBS} are missing")
    logprobs = torch.as_tensor(given).detach().cpu().to(torch.float32)
    if logprobs.shape != (length,):
        raise StepInvalid(f"{where} has {length} token ids but {LOGPROBS} of shape {list(logprobs.shape)}")
    if not bool(torch.isfinite(logprobs).all()):
        raise StepInvalid(f"{where}.{LOGPROBS}: one is not a finite number")
    return logprobs


def _check_prompt(prompt: Any, log: MessageLog) -> None:
    if not isinstance(prompt, Sequence) or len(prompt) != 1:
        raise StepInvalid("input_message_log must be the first message of message_log")
    try:
        ids = token_ids_of(prompt[0][TOKEN_IDS])
    except (KeyError, TypeError, ValueError) as error:
        raise StepInvalid(f"input_message_log[0].token_ids: {error}") from error
    if ids.tolist() != log[0][TOKEN_IDS].tolist():
        # The group's baseline is that of this prompt.
        raise StepInvalid("input_message_log[0].token_ids differ from those of message_log[0]")
