"""NeMo Gym's model server over an endpoint of OpenAI's API.

python serve_nemo_gym_model.py http://127.0.0.1:8000/v1
"""

from __future__ import annotations

import os
import sys
from typing import Any

from tests.adapters.libraries.serve_nemo_gym import serve


def make(url: str) -> Any:
    from nemo_gym.config_types import BaseServerConfig
    from nemo_gym.server_utils import ServerClient
    from omegaconf import OmegaConf
    from responses_api_models.vllm_model.app import VLLMModel, VLLMModelConfig

    model = VLLMModel(
        config=VLLMModelConfig(
            host="127.0.0.1",
            port=1,
            entrypoint="app.py",
            name="policy",
            base_url=url,
            api_key="none",
            model="tiny",
            return_token_id_information=True,
            uses_reasoning_parser=False,
        ),
        server_client=ServerClient(
            head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=OmegaConf.create({})
        ),
    )
    return model.setup_webserver()


if __name__ == "__main__":
    # What a server of NeMo Gym's gets from the command that starts it.
    os.environ["NEMO_GYM_CONFIG_DICT"] = "head_server: null"
    serve(make(sys.argv[1]))
