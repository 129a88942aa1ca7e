"""Digests of models and tokenizers change with what shapes tokens, and with nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kuberoll_workers.data.provenance import model_source, tokenizer_sources
from tests.local.support import TINY


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def edited(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def flipped(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


CHANGES: list[tuple[Callable[[Path], object], set[str]]] = [
    (lambda path: (path / "chat_template.jinja").write_text("{{ messages }}"), {"chat template"}),
    (lambda path: edited(path / "tokenizer_config.json", chat_template="{{ messages }}"), {"chat template"}),
    (lambda path: edited(path / "tokenizer_config.json", eos_token="<|pad|>"), {"tokenizer"}),
    (lambda path: flipped(path / "tokenizer.json", 0), {"tokenizer"}),
    (lambda path: edited(path / "config.json", model_type="qwen2"), {"tokenizer", "model"}),
    (lambda path: edited(path / "generation_config.json", eos_token_id=7), {"model"}),
    (lambda path: flipped(path / "model.safetensors", -1), {"model"}),
    (lambda path: (path / "README.md").write_text("read me"), set()),
]


@pytest.mark.parametrize(("change", "names"), CHANGES)
def test_a_change_is_seen_where_it_is(change: Callable[[Path], object], names: set[str], model: Path) -> None:
    def sources() -> dict[str, str]:
        return {**tokenizer_sources(model, own_template=False), "model": model_source(model)}

    before = sources()
    change(model)
    after = sources()
    assert {name for name in before | after if before.get(name) != after.get(name)} == names


def test_what_the_hub_s_cache_has_is_its_commit(model: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--me--tiny" / "snapshots" / ("c" * 40)
    shutil.copytree(model, snapshot)
    assert model_source(snapshot) == f"commit {'c' * 40}"
    assert tokenizer_sources(snapshot, own_template=False) == {"tokenizer": f"commit {'c' * 40}"}


def test_a_job_s_own_template_takes_the_place_of_the_tokenizer_s(model: Path) -> None:
    assert set(tokenizer_sources(model, own_template=True)) == {"tokenizer"}
