"""A tiny classifier with random weights, for servers of reward models, and its scores by transformers."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer

TINY: Final = Path(__file__).parents[1] / "examples" / "models" / "tiny-policy"

ENGINE_ARGS: Final[Mapping[str, Any]] = {
    "runner": "pooling",
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "enforce_eager": True,
}

VARIABLES: Final = {"VLLM_CPU_KVCACHE_SPACE": "1"}
"""Environment variables of its server."""


def make_classifier(directory: Path) -> Path:
    """Write a classifier with one class, random weights and the tiny policy's tokenizer; returns the directory."""
    import torch
    import transformers

    config = transformers.LlamaConfig.from_pretrained(TINY)
    config.num_labels = 1
    config.dtype = "float32"
    torch.manual_seed(5)
    made = transformers.LlamaForSequenceClassification(config).float()
    torch.nn.init.normal_(made.score.weight, std=0.5)
    made.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(TINY / name, directory / name)
    return directory


def logits(model: Path, chats: Sequence[list[dict[str, str]]]) -> list[float]:
    """Scores of transformers' own forward pass."""
    import torch
    import transformers

    classifier = transformers.LlamaForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    template = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer = HuggingFaceTokenizer.load(str(model))
    found = []
    for chat in chats:
        text = template.apply_chat_template(chat, tokenize=False, add_generation_prompt=False)
        ids = torch.tensor([list(tokenizer.encode(text))])
        with torch.no_grad():
            found.append(float(classifier(input_ids=ids).logits[0, 0]))
    return found
