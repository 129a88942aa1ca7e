"""A server with tools on NeMo Gym's own base of servers with `/reset` and `/step`, as its README writes one."""

from __future__ import annotations

import json
from typing import Any

from nemo_gym.openai_utils import NeMoGymResponse
from nemo_gym.server_utils import SESSION_ID_KEY
from resources_servers.gymnasium import GymnasiumServer, extract_text
from starlette.requests import Request

from tests.adapters.libraries.serve_nemo_gym import make, serve

PRICES = {"apple": 3, "pear": 4}


class Shop(GymnasiumServer):  # type: ignore[misc]
    """A price to find out; it counts the sessions that were closed."""

    closed: int = 0

    def setup_webserver(self) -> Any:
        app = super().setup_webserver()
        app.post("/close")(self.close)
        return app

    async def close(self, request: Request) -> dict[str, Any]:
        self.closed += 1
        await self.close_session(request.session[SESSION_ID_KEY])
        return {}

    async def reset(self, metadata: dict[str, Any], session_id: str | None = None) -> tuple[str | None, dict[str, Any]]:
        self.session_state[session_id] = []
        supported = {"supports_explicit_close": True, "supports_step_idempotency": True}
        return f"{self.closed} closed. What is {metadata['wanted']}?", supported

    async def step(
        self, action: NeMoGymResponse, metadata: dict[str, Any], session_id: str | None = None
    ) -> tuple[str | None, float, bool, bool, dict[str, Any]]:
        asked = self.session_state[session_id]
        calls = [item for item in action.output if item.type == "function_call"]
        text = extract_text(action)
        if calls:
            items = [json.loads(call.arguments)["item"] for call in calls]
            asked += items
            outputs = [self.tool_output(call, PRICES.get(item)) for call, item in zip(calls, items, strict=True)]
            return (f"You said {text!r}." if text else None), 0.125, False, False, {"tool_outputs": outputs}
        if text == "enough":
            return None, 0.0, False, True, {}
        right = text == str(PRICES[metadata["wanted"]])
        info = {"asked": asked, "request": metadata["_ng_step_request_id"]}
        return None, float(right), right, False, info if right else {}


if __name__ == "__main__":
    serve(make(Shop, "shop"))
