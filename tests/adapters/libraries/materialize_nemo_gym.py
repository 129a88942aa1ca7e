"""NeMo Gym's materialized inputs of a dataset, as its rollout collection writes them.

python materialize_nemo_gym.py rows.jsonl rollouts.jsonl 3

It writes `rollouts_materialized_inputs.jsonl`, with three numbered and seeded rollouts of each row.
"""

from __future__ import annotations

import sys

import orjson


def main(rows: str, rollouts: str, repeats: str) -> None:
    from nemo_gym.rollout_collection import RolloutCollectionConfig, RolloutCollectionHelper

    config = RolloutCollectionConfig(
        input_jsonl_fpath=rows,
        output_jsonl_fpath=rollouts,
        num_repeats=int(repeats),
        num_repeats_add_seed=True,
        responses_create_params={"temperature": 0.25},
    )
    made = RolloutCollectionHelper()._preprocess_rows_from_config(config)
    with config.materialized_jsonl_fpath.open("wb") as file:
        file.writelines(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in made)


if __name__ == "__main__":
    main(*sys.argv[1:])
