"""A plain sampler that plays the environments with the model in this process: a look at the training, no more.

The policy's scores are measured with the real stack, by `kuberoll run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.environments.interface import ChatMessage, EnvironmentInterface, Metadata

_MAX_NEW_TOKENS = 32


@dataclass(slots=True)
class _Episode:
    log: list[ChatMessage]
    metadata: Metadata
    stops: Sequence[str]
    context: list[int]
    reward: float = 0.0
    over: bool = False
    reply: list[int] = field(default_factory=list)


def mean_reward(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    environment: EnvironmentInterface,
    *,
    episodes: int,
    seed: int,
    max_turns: int = 20,
) -> float:
    """Mean reward per episode at temperature 1."""
    loop = HuggingFaceTokenizer(tokenizer)
    generator = torch.Generator().manual_seed(seed)
    rows = environment.generate_dataset(episodes, seed)
    running = [_Episode(list(r["messages"]), r["metadata"], r["stop_strings"], _prompt(loop, r)) for r in rows]
    played = list(running)
    for _ in range(max_turns):
        _generate(model, loop, running, generator)
        for episode in running:
            episode.log.append({"role": "assistant", "content": loop.decode(episode.reply)})
        result = environment.step([e.log for e in running], [e.metadata for e in running])
        for index, episode in enumerate(running):
            observation = dict(result.observations[index])
            episode.log.append(observation)
            episode.context += [*episode.reply, *loop.encode(observation["content"])]
            episode.metadata = result.metadata[index]
            episode.stops = (result.next_stop_strings or [])[index] or ()
            episode.reward += float(result.rewards[index])
            episode.over = bool(result.terminateds[index])
        running = [episode for episode in running if not episode.over]
        if not running:
            break
    return sum(episode.reward for episode in played) / len(played)


def _prompt(loop: HuggingFaceTokenizer, row: dict[str, Any]) -> list[int]:
    return list(loop.render_chat(row["messages"]))


@torch.inference_mode()
def _generate(
    model: LlamaForCausalLM, loop: HuggingFaceTokenizer, episodes: list[_Episode], generator: torch.Generator
) -> None:
    """One reply for each episode, without a cache: the contexts are short."""
    for episode in episodes:
        episode.reply = []
    waiting = list(episodes)
    for _ in range(_MAX_NEW_TOKENS):
        sequences = [episode.context + episode.reply for episode in waiting]
        ids = torch.zeros(len(waiting), max(map(len, sequences)), dtype=torch.long)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = torch.tensor(sequence)
        last = torch.tensor([len(sequence) - 1 for sequence in sequences])
        hidden = model.model(input_ids=ids).last_hidden_state[torch.arange(len(waiting)), last]
        drawn = torch.multinomial(model.lm_head(hidden).float().softmax(-1), 1, generator=generator)
        for episode, token in zip(waiting, drawn.flatten().tolist(), strict=True):
            episode.reply.append(token)
        waiting = [e for e in waiting if not any(stop in loop.decode(e.reply) for stop in e.stops)]
        if not waiting:
            return
