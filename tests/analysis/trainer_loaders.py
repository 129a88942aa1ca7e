"""Loaders of trainers, from their sources, applied to an exported file; what they made of it is written as JSON.

python trainer_loaders.py slime run.slime.pt
"""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path
from typing import Any

SOURCES = Path(os.environ["KUBEROLL_TEST_TRAINERS"])


def table(path: str) -> dict[str, list[Any]]:
    import pyarrow.parquet

    columns: dict[str, list[Any]] = pyarrow.parquet.read_table(path).to_pydict()
    return columns


def slime(path: str) -> Any:
    from slime.observability.rollout_data_utils import (
        load_debug_rollout_data,
        tensorize_rollout_data_for_training,
        validate_rollout_id_annotated,
    )
    from slime.utils.data import get_source

    samples = load_debug_rollout_data(path, rollout_id=0)
    validate_rollout_id_annotated(samples)
    for sample in samples:
        sample._validate_response_metadata_lengths()
    data = {
        "tokens": [sample.tokens for sample in samples],
        "loss_masks": [sample.loss_mask for sample in samples],
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
    }
    tensorize_rollout_data_for_training(data)
    return {
        "groups": [[sample.group_index, sample.index, sample.rollout_id] for sample in samples],
        "status": [sample.status.value for sample in samples],
        "source": [get_source(sample) for sample in samples],
        "lengths": [[sample.response_length, sample.effective_response_length] for sample in samples],
        "versions": [sample.weight_versions for sample in samples],
        "reward": [sample.reward for sample in samples],
        **{name: [tensor.tolist() for tensor in tensors] for name, tensors in data.items()},
    }


def skyrl(path: str) -> Any:
    from skyrl.train.dataset.pretokenized import load_from_pretokenized

    rows = load_from_pretokenized(path)
    return {
        "sft": [{name: row[name] for name in ("input_ids", "num_actions", "loss_mask")} for row in rows],
        "output": _validated(table(path)),
    }


def _validated(columns: dict[str, list[Any]]) -> Any:
    """A `GeneratorOutput` that SkyRL's check accepts, which needs a newer Python if it is imported."""
    import logging

    import numpy

    file = SOURCES / "SkyRL/skyrl/train/utils/trainer_utils.py"
    module = ast.parse(file.read_text())
    module.body = [item for item in module.body if getattr(item, "name", "") == "validate_generator_output"]
    names = {"np": numpy, "logger": logging.getLogger(), "GeneratorOutput": dict}
    exec(compile(module, str(file), "exec"), names)
    fields = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs")
    output = {name: columns[name] for name in fields}
    check: Any = names["validate_generator_output"]
    check(len(columns["rewards"]), output)
    return output


def prime_rl(path: str) -> Any:
    import asyncio
    import tempfile

    import msgspec
    from prime_rl.trainer.batch import prepare_sample
    from prime_rl.transports.rollouts.filesystem import FileSystemMicroBatchReceiver, FileSystemMicroBatchSender
    from prime_rl.transports.rollouts.types import TrainingSample

    columns = table(path)
    names = ("token_ids", "mask", "logprobs", "temperatures", "env_name")
    batches = []
    for place, reward in enumerate(columns["reward"]):
        row = {name: columns[name][place] for name in names}
        length = len(row["token_ids"])
        made = TrainingSample(**row, advantages=[reward] * length)
        # The constructor does not check types.
        sample = msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=TrainingSample)
        batches.append(prepare_sample(sample, seq_len=64))
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(FileSystemMicroBatchSender(Path(directory), 1).send([batches]))
        received = FileSystemMicroBatchReceiver(Path(directory), 0).receive()
    return [
        {"input_ids": batch.input_ids, "loss_mask": batch.loss_mask, "logprobs": batch.inference_logprobs}
        for batch in received
    ]


def areal(path: str) -> Any:
    import torch
    from areal.infra.workflow_executor import check_trajectory_format
    from areal.utils.data import concat_padded_tensors

    columns = table(path)
    types = {
        "input_ids": torch.int32, "attention_mask": torch.bool, "loss_mask": torch.int32, "logprobs": torch.float32,
        "rewards": torch.float32, "versions": torch.int32,
    }  # fmt: skip
    made = []
    for place in range(len(columns["rewards"])):
        fields = {name: torch.tensor([columns[name][place]], dtype=dtype) for name, dtype in types.items()}
        assert check_trajectory_format(fields, batch_size=1)
        made.append(fields)
    return {name: tensor.tolist() for name, tensor in concat_padded_tensors(made).items()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(globals()[sys.argv[1]](sys.argv[2])))
