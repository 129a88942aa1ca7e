"""A policy that calls tools by itself: the tiny policy, trained on a few transcripts, which takes seconds."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kuberoll_workers.data.messages import Message
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.data.tools import Tool
from tests.local.support import TINY

STEPS = 160
_IGNORED = -100
"""Label of ids that nothing is learned from."""


def train(directory: Path, transcripts: Sequence[Sequence[tuple[str, bool]]], *, steps: int = STEPS) -> Path:
    """Train the policy on transcripts, until it writes little else; its directory.

    Args:
        transcripts: Parts of a sequence, each with whether the policy writes it; special tokens are their texts.
        steps: Number of steps; few transcripts, in which the policy writes little, need more of them.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from transformers import AutoModelForCausalLM

    tokenizer = HuggingFaceTokenizer.load(str(TINY))
    sequences: list[Any] = []
    labels: list[Any] = []
    for transcript in transcripts:
        encoded = [(tokenizer.encode(text).tolist(), written) for text, written in transcript]
        sequences.append(torch.tensor([token for ids, _ in encoded for token in ids]))
        labels.append(torch.tensor([token if written else _IGNORED for ids, written in encoded for token in ids]))
    # What is filled in comes last, and is read by nothing that is learned from.
    batch = pad_sequence(sequences, batch_first=True)
    wanted = pad_sequence(labels, batch_first=True, padding_value=_IGNORED)
    shutil.copytree(TINY, directory)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(str(TINY), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with _one_thread():
        for _ in range(steps):
            optimizer.zero_grad()
            model(input_ids=batch, labels=wanted).loss.backward()
            optimizer.step()
    model.save_pretrained(str(directory))
    return directory


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Several threads wait for each other longer than they work, on a machine whose cores are busy."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Scorer:
    """Log-probabilities of a policy's tokens in one teacher-forced pass of transformers, in float32.

    Where vLLM constrains what is sampled, to calls that fit the schemas of tools, by the same grammar.
    """

    def __init__(self, model: Path, *, temperature: float) -> None:
        import xgrammar
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._temperature = temperature
        self._model = AutoModelForCausalLM.from_pretrained(str(model), dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(str(model))
        size = self._model.config.vocab_size
        self._compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size))

    def score(
        self, messages: Sequence[Message], tools: Sequence[Tool], choices: Iterable[str]
    ) -> Iterator[tuple[Message, list[float]]]:
        """The sampled messages of a path, with the log-probability of each of their ids given all ids before it.

        Args:
            choices: The field `tool_choice` of their requests.
        """
        import torch

        ids = [token for message in messages for token in message.token_ids]
        with torch.inference_mode(), _one_thread():
            logits = self._model(input_ids=torch.tensor([ids])).logits[0] / self._temperature
        position, remaining = 0, iter(choices)
        for message in messages:
            end = position + len(message.token_ids)
            if message.logprobs is not None:
                scores = logits[position - 1 : end - 1].clone()
                self._constrain(scores, ids[position:end], tools, next(remaining))
                logprobs = scores.log_softmax(-1)
                yield message, [float(row[token]) for row, token in zip(logprobs, ids[position:end], strict=True)]
            position = end

    def _constrain(self, logits: Any, ids: Sequence[int], tools: Sequence[Tool], choice: str) -> None:
        import xgrammar
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
        from vllm.tool_parsers.structural_tag_registry import get_model_structural_tag

        offered = [ChatCompletionToolsParam.model_validate(tool) for tool in tools]
        tag = get_model_structural_tag(model="hermes", tools=offered, tool_choice=choice, reasoning=False)
        if tag is None:
            return
        matcher = xgrammar.GrammarMatcher(self._compiler.compile_structural_tag(json.dumps(tag.model_dump())))
        mask = xgrammar.allocate_token_bitmask(1, logits.shape[-1])
        for row, token in zip(logits, ids, strict=True):
            matcher.fill_next_token_bitmask(mask)
            xgrammar.apply_token_bitmask_inplace(row[None], mask)
            assert matcher.accept_token(token), "the token is not in the grammar"
