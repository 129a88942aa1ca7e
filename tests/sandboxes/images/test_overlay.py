"""Overlays are mounted by the kernel with the options that are made here, with as many layers as images have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.sandboxes.images.errors import ImageRefused
from kuberoll_workers.sandboxes.images.overlay import MAX_OPTIONS, overlay_options
from kuberoll_workers.sandboxes.users import id_map
from tests.sandboxes.images.machine import mounted

KEY = "5llnkg2zv2rbht3po27kuvku6e"


def layer(directory: Path, number: int, name: str | None = None) -> Path:
    made = directory / (name or f"{number:026d}")
    made.mkdir(parents=True)
    ids = id_map()
    (made / f"file{number}").write_text(str(number))
    (made / "top").write_text(str(number))
    for path in (made, *made.iterdir()):
        os.chown(path, ids.outside(0), ids.outside_group(0))
    return made


def read(root: str) -> list[str]:
    found = sorted(path.name for path in Path(root).iterdir())
    Path(root, "written").write_text("in the upper layer")
    return [Path(root, "top").read_text(), *found]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 127])
def test_as_many_layers_as_images_have(place: Path, count: int) -> None:
    layers = [layer(place / "store/layers", number) for number in range(count)]
    found = mounted(id_map(), layers, place / "scratch", read)
    assert found == [str(count - 1), *sorted(["top", *(f"file{number}" for number in range(count))])]
    assert (place / "scratch/upper/written").read_text() == "in the upper layer"
    assert not any((path / "written").exists() for path in layers)


@pytest.mark.slow
def test_names_that_mean_something_in_options(place: Path) -> None:
    odd = place / "a:b,c\\d e"
    layers = [layer(odd / f"x{number}", number, name=f"l:{number},\\") for number in range(3)]
    found = mounted(id_map(), layers, odd / "scratch", read)
    assert found == ["2", "file0", "file1", "file2", "top"]
    assert (odd / "scratch/upper/written").exists()


def test_too_many_are_refused_with_what_to_do() -> None:
    layers = [Path(f"/store/layers/{number:026d}") for number in range(200)]
    with pytest.raises(
        ImageRefused, match=r"200 layers take 5[0-9]* bytes of mount options, and a mount has 4095: squash"
    ):
        overlay_options(layers, Path("/u"), Path("/w"))
    with pytest.raises(ImageRefused, match="overlayfs takes 500"):
        overlay_options(layers * 3)


@given(st.integers(1, 127), st.integers(1, 200))
def test_names_of_a_store_fit(count: int, length: int) -> None:
    directory = Path("/" + "d" * length)
    how = overlay_options([directory / f"{number:026d}" for number in range(count)], directory / "u", directory / "w")
    assert how.directory == directory
    assert len(how.options) <= MAX_OPTIONS
    assert how.options.split(",")[1].removeprefix("lowerdir=").split(":")[0] == f"{count - 1:026d}"
