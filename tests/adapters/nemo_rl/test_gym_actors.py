"""NeMo Gym's rollouts from real Ray actors, and beside NeMo RL's own functions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kuberoll_workers.adapters.nemo_rl import RolloutLimits, run_nemo_gym_rollout_sync
from tests.adapters.nemo_rl.fake_gym import CONFIG, Gym, Policy, Tokenizer, batch_of, result
from tests.environments.ray_actors import Renewed, actor_pool

NEMO_RL = os.environ.get("KUBEROLL_TEST_NEMO_RL", "")
"""Directories with NeMo RL's source, its recorded rollouts in `tests`, and what it imports, as in PYTHONPATH."""


class Failing(Gym, Renewed):
    """Row 1 fails in its first attempt, and in all further ones if its row says so."""

    def __init__(self) -> None:
        super().__init__(self._outcome)

    def _outcome(self, row: dict[str, Any], attempt: int) -> Any:
        number = row["_rowidx"]
        fails = number == 1 and (attempt == 1 or row.get("broken"))
        return ValueError(f"attempt {attempt}") if fails else result(("p", "x" * (number + 1)))

    def asked(self) -> list[list[int]]:
        return self.calls


@pytest.fixture(scope="module")
def actors(ray: Any) -> Iterator[Callable[[], Any]]:
    with actor_pool(ray, Failing) as maker:
        yield maker


@pytest.fixture
def actor(actors: Any) -> Any:
    return actors()()


@pytest.mark.parametrize("broken", [False, True])
def test_a_streaming_actor(ray: Any, actor: Any, broken: bool) -> None:
    batch = batch_of(3)
    batch["extra_env_info"][1]["broken"] = broken
    got = run_nemo_gym_rollout_sync(
        Policy(), batch, Tokenizer(), {"nemo_gym": actor}, CONFIG, log_full_result_tables=False,
        limits=RolloutLimits(backoff_seconds=0.0),
    ).final_batch  # fmt: skip
    assert [len(log) for log in got["message_log"]] == ([2, 1, 2] if broken else [2, 2, 2])
    assert got["total_reward"].isnan().tolist() == [False, broken, False]
    if broken:
        assert (got["failure"][1].kind, got["failure"][1].cause) == ("environment", "attempt 2")
    calls = ray.get(actor.asked.remote())
    assert calls[0] == [0, 1, 2]
    assert sorted(calls[1:]) == [[0], [1]]


def test_a_dead_actor_is_the_infrastructure_s_failure(ray: Any) -> None:
    dead = ray.remote(Gym).options(num_cpus=0).remote()
    ray.kill(dead)
    got = run_nemo_gym_rollout_sync(
        Policy(), batch_of(2), Tokenizer(), {"nemo_gym": dead}, CONFIG, log_full_result_tables=False,
        limits=RolloutLimits(environment_attempts=1),
    )  # fmt: skip
    assert [failure.kind for failure in got.final_batch["failure"]] == ["infrastructure"] * 2


_BOTH = """
import copy, json, math, sys
from pathlib import Path
from types import SimpleNamespace
import ray, torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience import rollouts as theirs
from kuberoll_workers.adapters import nemo_rl as ours

recorded = json.loads(Path(sys.argv[1]).read_text())
# As long as the longer rollout, which is truncated therefore.
WINDOW = max(
    sum((len(message["token_ids"]) or 2) + 3 + number for message in made["message_log"][::2])
    for number, made in enumerate(recorded["expected_output"])
)

class Tokenizer:
    pad_token_id = 0
    def batch_decode(self, rows): return [" ".join(map(str, ids)) for ids in rows]
    def encode(self, text, *, add_special_tokens): return list(text.encode())

class Actor:
    # NeMo RL's own processing of responses, of which the recorded rollouts have the prompts.
    def __init__(self, recorded):
        self.recorded = recorded
    async def run_rollouts(self, rows, timer_prefix, deduplicate=False):
        # Here, because Ray pickles this class with all that it refers to.
        from nemo_rl.environments.nemo_gym import NemoGym

        process = NemoGym.__ray_metadata__.modified_class._postprocess_nemo_gym_to_nemo_rl_result
        for row in reversed(rows):
            number, seen, output = row["_rowidx"] % len(self.recorded), [], []
            log = self.recorded[number]["message_log"]
            for user in log[::2]:
                # The records leave out what was sampled, and the prompts after it.
                sampled = [7 + len(output)] * (3 + number)
                seen = seen + (user["token_ids"] or [5, 6])
                output.append({
                    "type": "message", "content": [{"type": "output_text", "text": f"answer {len(output)}"}],
                    "prompt_token_ids": seen, "generation_token_ids": sampled,
                    "generation_log_probs": [-0.5] * len(sampled),
                })
                seen = seen + sampled
            response = {
                "reward": [0.25, 1.0][number], "accuracy": bool(number), "response": {"output": output},
                "reward_components": {"format": 0.25, "answer": [0.0, 0.75][number]},
                "instance_config": {"mask_sample": number == 0},
                "responses_create_params": row["responses_create_params"],
            }
            made = process(SimpleNamespace(cfg={}), row, response, Tokenizer())
            yield row["_rowidx"], made, ({f"{timer_prefix}/await": 1.0} if row is rows[0] else None)

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, address="local")
actor = ray.remote(Actor).options(num_cpus=0).remote(recorded["expected_output"])
config = {"max_new_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": None, "stop_strings": None,
          "stop_token_ids": None}
policy = SimpleNamespace(cfg={"vllm_cfg": {"max_model_len": WINDOW}})

def run(module):
    rows = [copy.deepcopy(row) for row in recorded["input"]] * 2
    batch = BatchedDataDict({
        "message_log": [[{"role": "user", "content": "", "token_ids": torch.tensor([])}] for _ in rows],
        "extra_env_info": [copy.deepcopy(row) for row in rows], "loss_multiplier": torch.ones(len(rows)),
    })
    return module.run_nemo_gym_rollout_sync(
        policy, batch, Tokenizer(), {"nemo_gym": actor}, config, log_full_result_tables=True,
        effort_config=None, reward_penalty_config={"penalize_empty_final_answer": True}, mask_env_flagged_samples=True,
    )

def plain(value):
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if type(value).__name__ == "Histogram":
        return [list(map(float, value.histogram)), list(map(float, value.bins))]
    if type(value).__name__ == "Table":
        return value.data
    return value

found = {}
for name, module in (("theirs", theirs), ("ours", ours)):
    got = run(module)
    found[name] = {
        "type": type(got.final_batch).__module__, "input_ids": plain(got.input_ids), "task_index": got.task_index,
        "batch": plain(got.final_batch.get_dict()), "metrics": plain(got.rollout_metrics),
    }
print("RESULT" + json.dumps(found))
ray.shutdown()
"""


@pytest.mark.ray
@pytest.mark.slow
def test_the_same_as_nemo_rl_s_own_functions(tmp_path: Path) -> None:
    places = [place for place in NEMO_RL.split(":") if place]
    name = Path("tests/unit/environments/nemo_gym_test_data/test_nemo_gym_sanity.json")
    recorded = [Path(place) / name for place in places if (Path(place) / name).exists()]
    if not recorded:
        pytest.skip("KUBEROLL_TEST_NEMO_RL names no directory with NeMo RL's source and its tests")
    # NeMo RL needs other versions of libraries than this process has loaded.
    done = subprocess.run(
        [sys.executable, "-c", _BOTH, str(recorded[0])], capture_output=True, text=True, timeout=400, check=False,
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.pathsep.join([*places, *filter(None, sys.path)])},
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stdout + done.stderr
    found = json.loads(lines[0].removeprefix("RESULT"))
    theirs, ours = found["theirs"], found["ours"]
    assert ours["input_ids"] == theirs["input_ids"]
    assert ours["type"] == theirs["type"] == "nemo_rl.distributed.batched_data_dict"
    for column, expected in theirs["batch"].items():
        assert ours["batch"][column] == expected, column
    assert set(ours["batch"]) - set(theirs["batch"]) == {"failure", "stop_reason"}
    untimed = {key: value for key, value in theirs["metrics"].items() if not key.startswith("timing/")}
    assert {key: ours["metrics"].get(key) for key in untimed} == pytest.approx(untimed, nan_ok=True)
    assert ours["metrics"]["timing/rollout/await"] == 1.0
