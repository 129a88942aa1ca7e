"""NeMo Gym's head server, which tells its commands where the agents are.

python serve_nemo_gym_head.py '{"agent": {"responses_api_agents": {"agent": {"host": "127.0.0.1", "port": 8000}}}}'
"""

from __future__ import annotations

import os
import sys
from typing import Any

from tests.adapters.libraries.serve_nemo_gym import serve


def make() -> Any:
    from nemo_gym.config_types import BaseServerConfig
    from nemo_gym.server_utils import HeadServer

    return HeadServer(config=BaseServerConfig(host="127.0.0.1", port=1)).setup_webserver()


if __name__ == "__main__":
    # What a server of NeMo Gym's gets from the command that starts it.
    os.environ["NEMO_GYM_CONFIG_DICT"] = sys.argv[1]
    serve(make())
