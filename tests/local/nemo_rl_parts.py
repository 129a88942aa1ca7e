"""What NeMo RL's scripts beside a served engine share: its puzzles, and new weights for the engine."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from nemo_rl.environments.games.sliding_puzzle import SlidingPuzzleGameLogic

PAD = 0


class ServedWeights:
    """The weights of an engine that `kuberoll serve` runs."""

    def __init__(self, engine: dict[str, Any]) -> None:
        """`engine` has its address and its tokens."""
        self._engine = engine

    def publish(self, model: Any, place: Path, version: int) -> None:
        """Save a model's weights and return when all replicas serve them."""
        model.save_pretrained(place)
        self._call("weights", {"uri": str(place), "version": str(version)})
        while {*self._call("read")["replicas"].values()} != {str(version)}:
            pass

    def _call(self, scope: str, body: dict[str, str] | None = None) -> Any:
        request = urllib.request.Request(
            self._engine["url"] + "/v1/weights",
            data=None if body is None else json.dumps(body).encode(),
            headers={"authorization": f"Bearer {self._engine['tokens'][scope]}"},
        )
        return json.load(urllib.request.urlopen(request, timeout=60))


def puzzle(tokenizer: Any, *, shuffle_moves: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A random 2×2 puzzle of NeMo RL's, and the message that begins it."""
    game = SlidingPuzzleGameLogic.generate({"size": 2, "shuffle_moves": shuffle_moves})
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": SlidingPuzzleGameLogic.init(game)}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0]
    return game, {"role": "user", "content": text, "token_ids": ids}
