"""NeMo Gym's own models of a request and of a response, and its statistics, applied to exported files.

python check_nemo_gym_rows.py rollouts.jsonl inputs.jsonl

It writes the entry of `_aggregate_metrics.json` that the package computes from the rollouts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def rows(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def main(rollouts: str, inputs: str) -> None:
    from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyResponse
    from nemo_gym.reward_profile import compute_aggregate_metrics

    for row in rows(inputs):
        BaseRunRequest.model_validate(row)
    results = rows(rollouts)
    for result in results:
        read = BaseVerifyResponse.model_validate(result).response.model_dump(exclude_unset=True)
        # Nothing of an item is unknown to the package's models.
        assert read["output"] == result["response"]["output"], (read["output"], result["response"]["output"])
    sys.stdout.write(compute_aggregate_metrics(results).model_dump_json())


if __name__ == "__main__":
    main(*sys.argv[1:])
