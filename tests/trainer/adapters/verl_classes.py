"""verl's own classes made of a run's batches. Run by test_verl.py with verl's source."""

from __future__ import annotations

import ast
import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from tensordict import TensorDict
from verl.protocol import DataProto

from kuberoll.trainer import Rollouts
from kuberoll.trainer.adapters.verl import agent_loop_outputs, to_data_proto_tensors

run, source, result = sys.argv[1:]


def part_of(path: str, *names: str, **given: object) -> SimpleNamespace:
    """Some definitions of a module of verl whose imports are not all here, executed from its source."""
    tree = ast.parse((Path(source) / path).read_text())
    named = (ast.ClassDef, ast.FunctionDef)
    wanted = [node for node in ast.walk(tree) if isinstance(node, named) and node.name in names]
    for node in wanted:
        node.decorator_list = []
    space = dict(given)
    # Annotations name classes that are not here.
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, *wanted], []), path, "exec"), space)
    return SimpleNamespace(**{name: space[name] for name in names})


(batch,) = Rollouts.open(run).batches(100)
parts = to_data_proto_tensors(batch, prompt_length=8, response_length=16, pad_id=3)
proto = DataProto.from_dict(**parts)
proto.check_consistency()
checked: list[str] = []

# Position ids are those of verl's own function.
compute_position_id_with_mask = part_of(
    "verl/utils/model.py", "compute_position_id_with_mask", torch=torch
).compute_position_id_with_mask
assert torch.equal(proto.batch["position_ids"], compute_position_id_with_mask(proto.batch["attention_mask"]))
checked.append("positions")

# What its trainer does with batches: reorder, split, put together, iterate.
halves = proto.chunk(2)
assert torch.equal(DataProto.concat(halves).batch["input_ids"], proto.batch["input_ids"])
assert [len(part) for part in proto.make_iterator(4, 1)] == [4] * (len(proto) // 4)
checked.append("batches")

# GRPO's advantages of verl's groups are those of the batch.
core = part_of(
    "verl/trainer/ppo/core_algos.py", "compute_grpo_outcome_advantage", torch=torch, np=np, defaultdict=defaultdict
)
advantages, _ = core.compute_grpo_outcome_advantage(
    proto.batch["rm_scores"].clone(), proto.batch["response_mask"], proto.non_tensor_batch["uid"]
)
expected = torch.from_numpy(batch.advantages)[:, None] * proto.batch["response_mask"]
assert torch.allclose(advantages, expected, atol=1e-5), (advantages, expected)
checked.append("advantages")

# verl's own way from its agent loop's outputs to a batch makes the same tensors.
loop = part_of(
    "verl/experimental/agent_loop/agent_loop.py",
    "AgentLoopMetrics", "AgentLoopOutput", "_InternalAgentLoopOutput", "_postprocess",
    BaseModel=BaseModel, ConfigDict=ConfigDict, Optional=Optional, Any=Any, torch=torch, np=np,
    TensorDict=TensorDict, DataProto=DataProto,
)  # fmt: skip
for model in (loop.AgentLoopMetrics, loop.AgentLoopOutput, loop._InternalAgentLoopOutput):
    model.model_rebuild(_types_namespace={**vars(loop), "Optional": Optional, "Any": Any, "torch": torch})


def padded(values: list[float], size: int, *, left: bool = False, fill: float = 0) -> torch.Tensor:
    row = torch.tensor(values)
    pad = torch.full((size - len(row),), fill, dtype=row.dtype)
    return torch.cat([pad, row] if left else [row, pad])[None]


inputs = []
for fields in agent_loop_outputs(batch):
    output = loop.AgentLoopOutput(**fields)
    prompt = padded(output.prompt_ids, 8, left=True, fill=3)
    response = padded(output.response_ids, 16, fill=3)
    mask = torch.cat(
        [padded([1] * len(output.prompt_ids), 8, left=True), padded([1] * len(output.response_ids), 16)], 1
    )
    inputs.append(
        loop._InternalAgentLoopOutput(
            prompt_ids=prompt,
            response_ids=response,
            input_ids=torch.cat([prompt, response], 1),
            position_ids=compute_position_id_with_mask(mask),
            response_mask=padded(output.response_mask, 16),
            attention_mask=mask,
            response_logprobs=padded(output.response_logprobs, 16),
            reward_score=output.reward_score,
            num_turns=output.num_turns,
            metrics=output.metrics,
            extra_fields=output.extra_fields,
        )
    )
theirs = loop._postprocess(None, inputs)
assert set(theirs.batch.keys()) == set(proto.batch.keys()), set(theirs.batch.keys()) ^ set(proto.batch.keys())
for name in theirs.batch.keys():  # noqa: SIM118 - iterating over a TensorDict goes by rows
    assert theirs.batch[name].dtype is proto.batch[name].dtype, name
    assert torch.equal(theirs.batch[name], proto.batch[name]), name
for name in ("__num_turns__", "task_index", "rollout_index", "policy_version"):
    assert theirs.non_tensor_batch[name].tolist() == proto.non_tensor_batch[name].tolist(), name
assert set(theirs.meta_info) == set(proto.meta_info)
checked.append("agent loop")
Path(result).write_text(json.dumps(checked))
