"""Files of a new environment: its module, a job that runs it, its test, and the tokenizer of a simulated model."""

from __future__ import annotations

import json
import keyword
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL = "simulated-model"
"""Directory of the tokenizer that new jobs use; several environments share it."""

_NAME = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*")
_MOST = 40

_MODULE = '''"""{title}: an environment for KubeRoll."""

import random

from kuberoll_workers.environments import EnvironmentInterface, EnvironmentReturn, ScoringCase, UnusableRow


class {class_name}(EnvironmentInterface):
    """The policy guesses a number; each wrong guess is answered with a hint.

    Episode state: `number`, and `left`, the guesses that are left.
    """

    row_metadata = {{"number": "the number to guess", "left": "guesses that are left"}}

    # Right and wrong responses with their rewards: `kuberoll env test` plays them.
    scoring_cases = [
        ScoringCase(row={{"metadata": {{"number": 4, "left": 3}}}}, responses=["4\\n"], reward=1),
        ScoringCase(row={{"metadata": {{"number": 4, "left": 3}}}}, responses=["7\\n", "4\\n"], reward=1),
        ScoringCase(row={{"metadata": {{"number": 4, "left": 1}}}}, responses=["5\\n"], reward=0),
        ScoringCase(row={{"metadata": {{"number": 4, "left": 1}}}}, responses=["4 or 5\\n"], reward=0),
    ]

    def __init__(self, config):
        self.highest = config.get("highest", 9)
        self.guesses = config.get("guesses", 4)

    def step(self, message_log_batch, metadata):
        """Answer the newest response of each episode."""
        turns = [self.answer(log[-1]["content"], state or {{}}) for log, state in zip(message_log_batch, metadata)]
        observations, states, stops, rewards, ended = zip(*turns)
        return EnvironmentReturn(observations, states, stops, rewards, ended)

    def answer(self, response, state):
        if not isinstance(state.get("number"), int) or not isinstance(state.get("left"), int):
            raise UnusableRow("metadata.number and metadata.left must be whole numbers")
        guess, left = response.strip(), state["left"] - 1
        right = guess == str(state["number"])
        over = right or left <= 0
        if right:
            text = "Right.\\n"
        elif not (guess.isascii() and guess.isdigit() and len(guess) < 10):
            text = "Write a whole number.\\n"
        else:
            text = "Higher.\\n" if int(guess) < state["number"] else "Lower.\\n"
        # A new state, not the old one changed: what an episode needs is in its metadata, and nowhere else.
        return {{"role": "environment", "content": text}}, {{**state, "left": left}}, ["\\n"], float(right), over

    def global_post_process_and_metrics(self, batch):
        """Compute metrics, once after the run."""
        rewards = batch["total_reward"]
        return batch, {{"solved": sum(reward > 0 for reward in rewards) / len(rewards)}} if rewards else {{}}

    def generate_dataset(self, count, seed):
        """Make dataset rows, the same ones for the same seed."""
        draw = random.Random(seed)
        prompt = f"Guess my number, from 0 to {{self.highest}}. You have {{self.guesses}} guesses, one in a line.\\n"
        return [
            {{
                "messages": [{{"role": "user", "content": prompt}}],
                "metadata": {{"number": draw.randint(0, self.highest), "left": self.guesses}},
                "stop_strings": ["\\n"],
                "idx": index,
            }}
            for index in range(count)
        ]
'''

_JOB = """# kuberoll run {module}.yaml
apiVersion: kuberoll.io/v1alpha1
kind: RolloutJob
metadata:
  name: {name}
spec:
  generation:
    model:
      source: {model} # {model_comment}
    # No engine while you write the environment: one of these texts is the response of each turn.
    engine: Simulated
    simulated:
      responses: ["2\\n", "4\\n", "7\\n"]
    engineArgs:
      max_model_len: 2048
    sampling:
      maxTokens: 64 # of one turn
  environments:
    - name: {name}
      entrypoint: {module}:{class_name}
      config: {{highest: 9, guesses: 4}}
      isolation: Inline # in a thread of the worker; Process: in processes of its own, which may hang and crash
  dataset:
    source:
      generator: {{count: 8, seed: 0}} # uri: rows.jsonl reads a file instead
    repeats: 4 # samples of each prompt
  rollout:
    maxTurns: 8
"""

_TEST = '''"""Tests of {module}.py: run them with pytest."""

from {module} import {class_name}

from kuberoll_workers.authoring import check_environment


def test_the_contract_of_environments():
    check_environment({class_name})


def test_the_contract_with_another_config():
    check_environment({class_name}, {{"highest": 99, "guesses": 2}})
'''


class NameRefused(ValueError):
    """The name cannot be that of an environment; the message says why."""


class FilesExist(ValueError):
    """Files are there already; nothing was written."""


@dataclass(frozen=True, slots=True)
class Names:
    """Names of a new environment.

    Attributes:
        name: In the job, with hyphens.
        module: Of the Python module.
        class_name: Of the class.
    """

    name: str
    module: str
    class_name: str

    @classmethod
    def of(cls, given: str) -> Names:
        """The names for `guess-word`, which may also be written `guess_word`.

        Raises:
            NameRefused: It is no name for a module, or one that exists already.
        """
        module = given.replace("-", "_")
        if not _NAME.fullmatch(given) or len(given) > _MOST:
            raise NameRefused(
                f"{given!r} is no name for an environment: use lowercase letters, digits and hyphens, as in guess-word"
            )
        if keyword.iskeyword(module) or module in sys.stdlib_module_names or module.startswith("kuberoll"):
            raise NameRefused(f"{given!r}: a module {module} would hide Python's or KubeRoll's own; use another name")
        words = module.split("_")
        return cls(given.replace("_", "-"), module, "".join(word.capitalize() for word in words))


def files_of(names: Names, model: str | None) -> dict[str, str]:
    """Contents of the files, by their path.

    Args:
        model: Source of the job's model; None: a small tokenizer of bytes is written beside it.
    """
    comment = "a tokenizer is enough for engine Simulated; for a real engine name a model: Qwen/Qwen2.5-0.5B-Instruct"
    fields = {
        "name": names.name,
        "module": names.module,
        "class_name": names.class_name,
        "title": names.name.replace("-", " ").capitalize(),
        # JSON's texts are YAML's, whatever is in them.
        "model": json.dumps(model) if model else MODEL,
        "model_comment": "a hub id, or a directory" if model else comment,
    }
    files = {
        f"{names.module}.py": _MODULE.format(**fields),
        f"{names.module}.yaml": _JOB.format(**fields),
        f"test_{names.module}.py": _TEST.format(**fields),
    }
    if model is None:
        files |= {f"{MODEL}/{name}": text for name, text in tokenizer_files().items()}
    return files


def write_new(files: Mapping[str, str], directory: Path) -> list[str]:
    """Write files that are not there yet; the tokenizer's may be there, if they are the same.

    Returns:
        The paths written, relative to the directory.

    Raises:
        FilesExist: One of them is there; none was written.
        OSError: The directory cannot be written.
    """
    there = {path for path in files if (directory / path).exists() or (directory / path).is_symlink()}
    kept = {path for path in there if path.startswith(f"{MODEL}/") and _same(directory / path, files[path])}
    if there - kept:
        listed = ", ".join(str(directory / path) for path in sorted(there - kept))
        raise FilesExist(f"{listed}: already there; nothing was written. Use another name, or DIR/NAME")
    written = []
    for path, text in files.items():
        if path in kept:
            continue
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        # Never over a file that somebody has made meanwhile.
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
        written.append(path)
    return written


def tokenizer_files() -> dict[str, str]:
    """Files of a model that is only a tokenizer: one token for each byte, and a chat template."""
    special = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|environment|>", "<|tool|>"]
    tokens = [*_byte_signs(), *special]
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": tokens.index(token), "content": token, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True,
            }
            for token in special
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)}, "merges": [],
        },
    }  # fmt: skip
    config = {
        "tokenizer_class": "TokenizersBackend",
        "backend": "tokenizers",
        "bos_token": special[0],
        "eos_token": special[1],
        "extra_special_tokens": special[2:],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    model = {"model_type": "llama", "vocab_size": len(tokens), "max_position_embeddings": 2048, "eos_token_id": 257}
    template = (
        "{{ '<|begin|>' }}{% for message in messages %}"
        "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    return {
        "tokenizer.json": json.dumps(tokenizer, indent=1) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=1) + "\n",
        "config.json": json.dumps(model, indent=1) + "\n",
        "chat_template.jinja": template,
    }


def _byte_signs() -> list[str]:
    """Visible characters for all 256 bytes, as byte-level tokenizers write them: unprintable ones are moved up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + number) for number in range(len(moved))]


def _same(path: Path, text: str) -> bool:
    try:
        return path.read_text(encoding="utf-8") == text
    except (OSError, UnicodeDecodeError):
        return False
