"""Tensors as bits, against safetensors and PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import load_file, save_file

from kuberoll_workers.data.weights.manifest import (
    ManifestRefused,
    WeightsManifest,
    decode_manifest,
    directory_name,
    encode_manifest,
    version_of_directory,
)
from kuberoll_workers.data.weights.tensors import (
    DTYPES,
    Tensor,
    UnusableWeights,
    bits_type,
    digest_of,
    dtype_named,
    read_directory,
    read_file,
    write_file,
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_is_read_as_it_was_written(dtype: str, tmp_path: Path) -> None:
    bits = numpy.arange(6).astype(bits_type(dtype))
    written = {
        "a": Tensor(dtype, (2, 3), bits),
        "none": Tensor(dtype, (0, 3), bits[:0]),
        "one": Tensor(dtype, (), bits[:1]),
    }
    write_file(tmp_path / "x.safetensors", written)
    read = read_file(tmp_path / "x.safetensors")
    assert {name: (t.dtype, t.shape, t.bits.tolist()) for name, t in read.items()} == {
        name: (t.dtype, t.shape, t.bits.tolist()) for name, t in written.items()
    }
    assert digest_of(read) == digest_of(written)


def test_the_files_are_those_of_safetensors(tmp_path: Path) -> None:
    values = {"a": numpy.arange(6, dtype=numpy.float32).reshape(2, 3), "b": numpy.array([True, False])}
    save_file(values, tmp_path / "theirs.safetensors")
    write_file(tmp_path / "ours.safetensors", read_file(tmp_path / "theirs.safetensors"))
    back = load_file(tmp_path / "ours.safetensors")
    assert back.keys() == values.keys()
    assert all((back[name] == values[name]).all() for name in values)


def test_a_writable_file_changes_on_the_disk(tmp_path: Path) -> None:
    save_file({"a": numpy.zeros(3, numpy.float32)}, tmp_path / "x.safetensors")
    read_file(tmp_path / "x.safetensors", writable=True)["a"].bits[1] = 0x3F800000
    assert load_file(tmp_path / "x.safetensors")["a"].tolist() == [0, 1, 0]


def test_files_divide_tensors_and_the_digest_does_not_care(tmp_path: Path) -> None:
    values = {name: numpy.full(3, number, numpy.float32) for number, name in enumerate("abc")}
    for name, parts in (("one", ["abc"]), ("two", ["a", "bc"])):
        (tmp_path / name).mkdir()
        for part in parts:
            save_file({key: values[key] for key in part}, tmp_path / name / f"model-{part}.safetensors")
    assert digest_of(read_directory(tmp_path / "one")) == digest_of(read_directory(tmp_path / "two"))
    save_file({"a": values["a"]}, tmp_path / "two" / "other.safetensors")
    with pytest.raises(UnusableWeights, match=r"a is in .* and in another file"):
        read_directory(tmp_path / "two")


def test_the_digest_has_names_types_and_shapes() -> None:
    bits = numpy.zeros(6, numpy.uint16)
    tensors = [{"a": Tensor("BF16", (2, 3), bits)}, {"b": Tensor("BF16", (2, 3), bits)}]
    tensors += [{"a": Tensor("F16", (2, 3), bits)}, {"a": Tensor("BF16", (6,), bits)}, {}]
    assert len({digest_of(one) for one in tensors}) == len(tensors)


def test_what_is_no_whole_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": numpy.zeros(30, numpy.float32)}, path)
    whole = path.read_bytes()
    for content in (b"", whole[:5], whole[:-1], b"{}" * 100):
        path.write_bytes(content)
        with pytest.raises(UnusableWeights, match="was it written completely"):
            read_file(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnusableWeights, match="give the directory of a saved model"):
        read_directory(tmp_path / "empty")
    with pytest.raises(UnusableWeights, match="lm_head: weights of type float4"):
        dtype_named("float4_e2m1fn_x2", where="lm_head")


def test_a_directory_without_a_file_of_its_index_is_refused(tmp_path: Path) -> None:
    names = [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    for name in names:
        save_file({name: numpy.zeros(3, numpy.float32)}, tmp_path / name)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict(zip("ab", names, strict=True))}))
    assert read_directory(tmp_path).keys() == set(names)
    (tmp_path / names[1]).unlink()
    with pytest.raises(UnusableWeights, match=f"names {names[1]}, which is not there; was it written completely"):
        read_directory(tmp_path)
    for content in ("", "{}", "[]", '{"weight_map": [1]}'):
        index.write_text(content)
        with pytest.raises(UnusableWeights, match="was it written completely"):
            read_directory(tmp_path)


def test_descriptions_of_others_are_refused() -> None:
    manifest = WeightsManifest(version=7, files={"model.safetensors": 12}, digest="00")
    assert decode_manifest(encode_manifest(manifest), where="here") == manifest
    for data, words in [
        (b"{", "here"),
        (b"{}", "missing required field"),
        (b'{"version":7,"files":{"../x":1}}', "which is not a name"),
        (b'{"version":7,"files":{},"base":{"directory":"a/b","digest":""}}', "'a/b'"),
        (b'{"version":7,"files":{},"format":2}', "update it"),
    ]:
        with pytest.raises(ManifestRefused, match=words):
            decode_manifest(data, where="here")


def test_names_of_directories_sort_as_their_versions_do() -> None:
    names = [directory_name(version) for version in (1, 2, 10, 99_999_999)]
    assert names == sorted(names)
    assert [version_of_directory(name) for name in names] == [1, 2, 10, 99_999_999]
    assert [version_of_directory(name) for name in ("version-", "step-1", "version-x", ".version-1")] == [None] * 4
