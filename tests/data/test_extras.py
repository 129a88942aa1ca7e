"""What brings a package that only some runs need: said where one is missing, by whatever reads a store."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

from kuberoll.trainer.journals import open_place
from kuberoll.trainer.locations import ObjectLocation
from kuberoll_workers.data.extras import EXTRAS, installation, unusable_store
from kuberoll_workers.data.model_cache.bucket import BucketModel
from kuberoll_workers.dataset.sources import file_rows
from kuberoll_workers.output.copies import Copies
from kuberoll_workers.output.part_journal import PartLimits
from kuberoll_workers.output.storage import ObjectStorage
from kuberoll_workers.serving.engines.fetching import fetch

ROOT = Path(__file__).resolve().parents[2]
URI = "gs://bucket/place"
OPENED: dict[str, Callable[[], Any]] = {
    "rows": lambda: list(file_rows(f"{URI}/rows.jsonl", Path())),
    "output": lambda: ObjectStorage(URI, PartLimits()),
    "a copy of a run": lambda: Copies(URI),
    "a trainer's run": lambda: open_place(URI),
    "published weights": lambda: ObjectLocation(URI),
    "posted weights": lambda: fetch(URI, "1"),
    "a model": lambda: BucketModel(URI).find(),
}


def hide(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Have the packages look as if they were not installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        monkeypatch.delitem(sys.modules, name)
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.parametrize("opened", OPENED)
def test_a_store_whose_package_is_missing_names_the_extra(opened: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "gcsfs")
    with pytest.raises(Exception, match=re.escape("gs:// needs gcsfs, which is not installed here: ")) as raised:
        OPENED[opened]()
    assert "pip install 'kuberoll[gcs]'" in str(raised.value)


@pytest.mark.parametrize("opened", ["a trainer's run", "published weights"])
def test_a_trainer_without_fsspec_is_told_the_extra_too(opened: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "fsspec", "gcsfs")
    with pytest.raises(Exception, match=r"needs gcsfs, .*: pip install 'kuberoll\[gcs\]'"):
        OPENED[opened]()


def test_other_stores_name_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "ossfs")
    missing = ImportError("Install ossfs")
    assert unusable_store("oss://a/b", missing) == "oss:// needs ossfs, which is not installed here: pip install ossfs"
    hide(monkeypatch, "fsspec")
    assert (
        unusable_store("oss://a/b", missing) == "oss:// needs fsspec, which is not installed here: pip install fsspec"
    )


def test_a_package_that_is_there_says_what_it_lacks() -> None:
    broken = ImportError("Install s3fs to access S3")
    broken.__cause__ = ImportError("cannot import name 'x' from 'aiobotocore'")
    assert unusable_store("s3://a/b", broken) == "cannot import name 'x' from 'aiobotocore'"
    assert unusable_store("nonsense://a", ValueError("Protocol not known")) == "Protocol not known"


def test_each_extra_brings_its_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    there = packages_distributions()
    for package, extra in EXTRAS.items():
        brought = {re.split(r"[^\w.-]", line)[0] for line in extras[extra]}
        assert brought & {package, *there.get(package, ())}
        assert installation(package) == f"pip install 'kuberoll[{extra}]'"
    assert installation("ossfs") == "pip install ossfs"
