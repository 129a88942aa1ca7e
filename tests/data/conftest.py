"""Fixtures of several modules."""

from __future__ import annotations

from pathlib import Path

import pytest

from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from tests.data.support import model


@pytest.fixture(params=["files", "transformers"])
def qwen3(request: pytest.FixtureRequest, tmp_path: Path) -> HuggingFaceTokenizer:
    found = model("qwen3").hugging_face
    if request.param == "transformers":
        return HuggingFaceTokenizer(found)
    found.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    return HuggingFaceTokenizer.load(str(tmp_path))
