"""What a manifest lacks in a cluster, by line and field, and what would be shipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from kuberoll_api.cli import main
from kuberoll_api.manifest.beside import MAX_BYTES, MAX_FILES, files_beside, size_text
from kuberoll_api.manifest.cluster import ClusterCheck, check_for_cluster
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_api.paths import format_path
from tests.test_docs import blocks

GPU = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
MATH = {"name": "math", "type": "math"}


def job(**spec: Any) -> RolloutJob:
    """A job that any cluster can run, with parts replaced."""
    given = {
        "generation": {"model": {"source": "org/model"}, **GPU},
        "environments": [MATH],
        "dataset": {"source": {"uri": "s3://bucket/rows.jsonl"}},
        "output": {"uri": "s3://bucket/run"},
        **spec,
    }
    head = {"apiVersion": "kuberoll.io/v1alpha1", "kind": "RolloutJob", "metadata": {"name": "job"}}
    return RolloutJob.model_validate({**head, "spec": given})


def mounted(container: str, path: str) -> dict[str, Any]:
    """A pod template whose main container mounts a claim."""
    return {
        "spec": {
            "containers": [{"name": container, "volumeMounts": [{"name": "data", "mountPath": path}]}],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        }
    }


def checked(base: Path, *, include: tuple[str, ...] = (), **spec: Any) -> ClusterCheck:
    return check_for_cluster(job(**spec), base, include=include)


def fields(findings: Any) -> list[str]:
    return [format_path(finding.path).removeprefix("spec.") for finding in findings]


def test_a_job_for_clusters_has_no_remarks(tmp_path: Path) -> None:
    found = checked(tmp_path)
    assert (found.problems, found.notes, found.beside.files) == ((), (), {})


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("output.uri", {"output": {"uri": "runs/first"}}),
        ("output.uri", {"output": {"uri": "file:///data"}}),
        ("generation.model.source", {"generation": {"model": {"source": "./model"}, **GPU}}),
        ("generation.model.source", {"generation": {"model": {"source": "~/model"}, **GPU}}),
        ("generation.model.source", {"generation": {"model": {"source": "saved"}, **GPU}}),
        ("generation.model.source", {"generation": {"model": {"source": "runs/7/model"}, **GPU}}),
        ("generation.model.tokenizer", {"generation": {"model": {"source": "org/m", "tokenizer": "../t"}, **GPU}}),
        ("generation.model.tokenizer", {"generation": {"model": {"source": "s3://bucket/model"}, **GPU}}),
        ("weights.uri", {"weights": {"uri": "./step-1", "version": "1"}}),
        (
            "generation.external.url",
            {
                "generation": {
                    "model": {"source": "org/m"},
                    "backend": "External",
                    "external": {"url": "http://localhost:8000"},
                }
            },
        ),
        (
            "generation.external.urls[0]",
            {
                "generation": {
                    "model": {"source": "org/m"},
                    "backend": "External",
                    "external": {"url": "http://policy:8000", "urls": ["http://127.0.0.1:1"]},
                }
            },
        ),
        ("dataset.source.uri", {"dataset": {"source": {"uri": "missing.jsonl"}}}),
        ("dataset.source.uri", {"dataset": {"source": {"uri": "data/*.parquet"}}}),
        ("dataset.source.uri", {"dataset": {"source": {"uri": "../rows.jsonl"}}}),
        ("dataset.source.uri", {"dataset": {"source": {"uri": "/data/rows.jsonl"}}}),
        ("dataset.source.uri", {"dataset": {"source": {"uri": "file:///data/rows.jsonl"}}}),
        ("dataset.source.huggingface.name", {"dataset": {"source": {"huggingface": {"name": "saved"}}}}),
        (
            "output.tracking.mlflow.trackingUri",
            {
                "output": {
                    "uri": "s3://b/r",
                    "tracking": {"mlflow": {"trackingUri": "sqlite:///mlflow.db", "experiment": "e"}},
                }
            },
        ),
    ],
)
def test_what_no_cluster_has_is_a_problem_of_its_field(field: str, spec: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "data").mkdir()
    assert fields(checked(tmp_path, **spec).problems) == [field]


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("output.uri", {"output": {}}),
        ("generation.resources", {"generation": {"model": {"source": "org/model"}}}),
        ("generation.model.source", {"generation": {"model": {"source": "/models/mine"}, **GPU}}),
        ("environments[0].entrypoint", {"environments": [{"name": "a", "entrypoint": "installed.games:Game"}]}),
    ],
)
def test_what_a_cluster_must_have_is_a_note(field: str, spec: dict[str, Any], tmp_path: Path) -> None:
    found = checked(tmp_path, **spec)
    assert (found.problems, fields(found.notes)) == ((), [field])


@pytest.mark.parametrize(
    "spec",
    [
        {"generation": {"model": {"source": "org/model"}, "engine": "Simulated"}},
        {
            "generation": {
                "model": {"source": "org/model"},
                "podTemplate": {
                    "spec": {"containers": [{"name": "generation", "resources": {"limits": {"amd.com/gpu": "1"}}}]}
                },
            }
        },
        {"generation": {"model": {"source": "/opt/kuberoll/models/tiny-policy"}, **GPU}},
        {
            "generation": {
                "model": {"source": "/models/mine"},
                "podTemplate": mounted("generation", "/models"),
                **GPU,
            }
        },
        {
            "dataset": {"source": {"uri": "/data/rows.jsonl"}},
            "workers": {"podTemplate": mounted("worker", "/data")},
        },
        {"environments": [{"name": "a", "entrypoint": "kuberoll_workers.environments.builtin.math.answers:M"}]},
        # Whoever names files knows what is in them.
        {
            "dataset": {"source": {"uri": "rows.jsonl"}},
            "environments": [{"name": "a", "entrypoint": "games:Game"}],
            "workers": {"files": {"configMap": {"name": "mine"}}},
        },
    ],
)
def test_what_the_job_itself_brings_is_no_remark(spec: dict[str, Any], tmp_path: Path) -> None:
    found = checked(tmp_path, **spec)
    assert (found.problems, found.notes, found.beside.files) == ((), (), {})


def test_a_module_in_the_working_directory_only_is_told_where_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "games.py").touch()
    base = tmp_path / "manifests"
    base.mkdir()
    [note] = checked(base, environments=[{"name": "a", "entrypoint": "games:Game"}]).notes
    assert "move it beside the manifest" in note.message


@pytest.mark.parametrize(
    ("uri", "shipped"),
    [
        ("rows.jsonl", ["rows.jsonl"]),
        ("./data/a.jsonl", ["data/a.jsonl"]),
        ("data/", ["data/a.jsonl", "data/b.jsonl"]),
        ("data/*.jsonl", ["data/a.jsonl", "data/b.jsonl"]),
    ],
)
def test_rows_beside_the_manifest_are_shipped(uri: str, shipped: list[str], tmp_path: Path) -> None:
    (tmp_path / "data" / "deeper").mkdir(parents=True)
    for name in ("rows.jsonl", "data/a.jsonl", "data/b.jsonl", "data/.hidden", "data/_done", "other.jsonl"):
        (tmp_path / name).write_text("{}\n")
    found = checked(tmp_path, dataset={"source": {"uri": uri}})
    assert (list(found.beside.files), found.problems) == (shipped, ())


def test_further_files_are_shipped_by_their_patterns(tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "short.txt").touch()
    found = checked(tmp_path, include=("words/*.txt",))
    assert (list(found.beside.files), found.problems) == (["words/short.txt"], ())
    for pattern in ("words/*.csv", "../*", "/etc/passwd"):
        [problem] = checked(tmp_path, include=(pattern,)).problems
        assert problem.message.startswith(f"--include {pattern}: no file below")


def test_files_that_do_not_fit_into_a_config_map_are_listed_by_size(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b" " * MAX_BYTES)
    (tmp_path / "games.py").write_text("#")
    fitting: dict[str, Any] = {"dataset": {"source": {"uri": "rows.jsonl"}}}
    assert checked(tmp_path, **fitting).problems == ()
    [problem] = checked(tmp_path, **fitting, environments=[{"name": "a", "entrypoint": "games:Game"}]).problems
    assert "rows.jsonl 1.0 MiB, games.py 1 B" in problem.message
    assert "object store" in problem.message
    assert "spec.workers.image" in problem.message


def test_files_that_are_too_many_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for number in range(MAX_FILES + 1):
        (tmp_path / "data" / f"{number}.jsonl").touch()
    [problem] = checked(tmp_path, dataset={"source": {"uri": "data"}}).problems
    assert f"{MAX_FILES + 1} files of 0 B" in problem.message


TASKS = {"name": "tasks", "agent": {"tools": {}}, "sandbox": {}}


def write(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("#\n")


def shipped(base: Path, **spec: Any) -> list[str]:
    return list(files_beside(job(**spec), base).files)


def test_tasks_of_a_folder_are_shipped_as_a_whole(tmp_path: Path) -> None:
    one = ["one/instruction.md", "one/files/data/a.txt", "one/tests/test.sh", "one/.harborignore"]
    write(tmp_path / "tasks", *one, "two/task.toml", "one/__pycache__/x.pyc", "notes/a.txt", "rows.csv")
    wanted = sorted(f"tasks/{name}" for name in [*one, "two/task.toml"])
    generation = {"model": {"source": "org/model"}, "toolCallParser": "hermes", **GPU}
    spec: dict[str, Any] = {"environments": [TASKS], "generation": generation}
    assert shipped(tmp_path, **spec, dataset={"source": {"uri": "tasks"}}) == wanted
    assert shipped(tmp_path, **spec, dataset={"source": {"uri": "tasks/two"}}) == ["tasks/two/task.toml"]
    # A folder of rows, where nobody plays tasks.
    assert shipped(tmp_path, dataset={"source": {"uri": "tasks"}}) == ["tasks/rows.csv"]


def test_tasks_that_rows_name_are_shipped(tmp_path: Path) -> None:
    write(tmp_path, "one/tests/test.sh", "two/tests/test.sh", "three/tests/test.sh")
    rows = [
        {"metadata": {"task": {"directory": name}}} for name in ("one", "../up", "none", str(tmp_path), "one", "none")
    ]
    lines = [json.dumps(row) for row in [*rows, {"metadata": {"task": "text"}}, {}]]
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines, "no json"]))
    generation = {"model": {"source": "org/model"}, "toolCallParser": "hermes", **GPU}
    found = files_beside(
        job(environments=[TASKS], generation=generation, dataset={"source": {"uri": "rows.jsonl"}}), tmp_path
    )
    assert list(found.files) == ["one/tests/test.sh", "rows.jsonl"]
    words = [finding.message for finding in found.problems]
    assert words[0].startswith("rows.jsonl:2: metadata.task.directory: there is no directory ../up below")
    assert words[1].startswith("rows.jsonl:3: metadata.task.directory: there is no directory none below")
    assert words[2].startswith(
        f"rows.jsonl:4: metadata.task.directory: {tmp_path} is a path of this machine; write the"
    )
    assert len(words) == 3
    inline = {"source": {"rows": [{"prompt": "Do it.", "metadata": {"task": {"directory": "two"}}}]}}
    assert shipped(tmp_path, environments=[TASKS], generation=generation, dataset=inline) == ["two/tests/test.sh"]
    volume = {
        "image": "workers",
        "podTemplate": mounted("worker", "/tasks"),
    }
    there = {"source": {"rows": [{"prompt": "Do it.", "metadata": {"task": {"directory": "/tasks/a"}}}]}}
    made = job(environments=[TASKS], generation=generation, dataset=there, workers=volume)
    assert files_beside(made, tmp_path).problems == ()


def test_programs_of_agents_are_shipped_with_what_they_import(tmp_path: Path) -> None:
    write(tmp_path, "run.sh", "lib/helper.py", "hidden/a/test.py", "other.py")
    (tmp_path / "lib" / "setup.py").write_text("import json\nimport helper\n")
    agent = {
        "setup": ["python", "lib/setup.py"],
        "command": ["./run.sh", "--fast", "/usr/bin/env"],
        "score": ["python", "missing.py"],
        "hidden": {"paths": ["./hidden"]},
    }
    found = files_beside(job(environments=[{"name": "a", "agent": agent, "isolation": "Process"}]), tmp_path)
    assert list(found.files) == ["hidden/a/test.py", "lib/helper.py", "lib/setup.py", "run.sh"]
    assert found.problems == ()


def test_absolute_paths_of_this_machine_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "setup.py")
    agent = {"command": ["run"], "setup": ["python", str(tmp_path / "setup.py")]}
    found = checked(tmp_path, environments=[{"name": "a", "agent": agent}])
    assert fields(found.problems) == ["environments[0].agent.setup[1]"]
    assert "write it relative to the manifest" in found.problems[0].message
    # Whether the workers' image has a program is not known here.
    agent = {"command": ["/opt/agent/run"], "setup": ["python", str(tmp_path / "none.py")]}
    assert checked(tmp_path, environments=[{"name": "a", "agent": agent}]).problems == ()


def test_sizes_are_texts() -> None:
    assert [size_text(size) for size in (0, 1023, 1536, 3 << 20)] == ["0 B", "1023 B", "1.5 KiB", "3.0 MiB"]


def test_many_files_are_named_in_part(tmp_path: Path) -> None:
    for number in range(7):
        (tmp_path / f"{number}.jsonl").touch()
    found = files_beside(job(dataset={"source": {"uri": "*.jsonl"}}), tmp_path)
    assert str(found) == "0.jsonl, 1.jsonl, 2.jsonl, 3.jsonl, 4.jsonl and 2 more (0 B)"


@pytest.fixture
def readme(tmp_path: Path) -> Path:
    """The README's manifest with what it needs beside it."""
    (text,) = blocks("README.md", "yaml")
    file = tmp_path / "my-job.yaml"
    file.write_text(text)
    (tmp_path / "guessing.py").write_text("class GuessTheNumber: ...\n")
    (tmp_path / "prompts.jsonl").write_text("{}\n")
    return file


def validate(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["validate", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_the_readme_s_manifest_can_be_applied(readme: Path) -> None:
    code, output, error = validate("--cluster", readme)
    assert (code, error) == (0, "")
    *notes, ships, ok = output.splitlines()
    assert [note.removeprefix(f"{readme}:").split(": note: ")[0] for note in notes] == [
        "4: spec.output.uri",
        "5: spec.generation.resources",
    ]
    assert ships == f"{readme}: note: `kuberoll apply` ships guessing.py, prompts.jsonl (29 B)"
    assert ok == f"{readme}: ok (RolloutJob my-job)"


def test_problems_have_their_lines_and_the_code_of_mistakes(readme: Path) -> None:
    (readme.parent / "prompts.jsonl").unlink()
    code, output, error = validate("--cluster", readme, "--set", "spec.output.uri=runs/x")
    assert code == 2
    assert "ok (" not in output
    first, second = error.splitlines()
    assert first.startswith('--set spec.output.uri=runs/x: spec.output.uri: found "runs/x", which is lost with the pod')
    assert second.startswith(f"{readme}:13: spec.dataset.source.uri: there is no file")


def test_without_the_option_nothing_is_said_of_clusters(readme: Path) -> None:
    assert validate(readme) == (0, f"{readme}: ok (RolloutJob my-job)\n", "")


def test_a_job_that_cannot_be_read_is_still_a_mistake(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    with file.open("w") as out:
        YAML().dump({"apiVersion": "kuberoll.io/v1alpha1", "kind": "RolloutJob", "metadata": {"name": "a"}}, out)
    assert validate("--cluster", file)[0] == 2


def claim(*modes: str, name: str = "runs") -> dict[str, Any]:
    """A PersistentVolumeClaim beside a job."""
    return {"kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": {"accessModes": list(modes)}}


@pytest.mark.parametrize(
    ("modes", "replicas", "problems", "notes"),
    [
        (["ReadWriteMany"], 3, [], []),
        (["ReadWriteOnce", "ReadWriteMany"], 3, [], []),
        (["ReadWriteOnce"], 1, [], []),
        (["ReadWriteOnce"], 3, [], ["so that all 3 workers run on one node, which must have room for them"]),
        (["ReadWriteOncePod"], 1, [], []),
        (["ReadWriteOncePod"], 3, ["takes one pod at a time, and spec.workers.replicas is 3; use ReadWriteMany"], []),
        (["ReadOnlyMany"], 1, ["is of access mode ReadOnlyMany: workers write to it"], []),
        ([], 3, [], []),
    ],
)
def test_a_claim_beside_a_job_says_who_can_write_to_it(
    modes: list[str], replicas: int, problems: list[str], notes: list[str], tmp_path: Path
) -> None:
    wanted = job(workers={"replicas": replicas}, output={"uri": "pvc://runs/first"})
    other = claim("ReadOnlyMany", name="other")
    found = check_for_cluster(wanted, tmp_path, others=[other, {"kind": "Secret"}, claim(*modes)])
    for expected, told in ((problems, found.problems), (notes, found.notes)):
        about = [finding.message for finding in told if finding.path == ("spec", "output", "uri")]
        assert len(about) == len(expected)
        assert all(words in message for words, message in zip(expected, about, strict=True))


def with_sandboxes(**sandbox: Any) -> dict[str, Any]:
    """Fields of a job whose trajectories have sandboxes."""
    generation = {"model": {"source": "org/model"}, "toolCallParser": "hermes", **GPU}
    return {"generation": generation, "environments": [{"name": "a", "agent": {"tools": {}}, "sandbox": sandbox}]}


def test_sandboxes_need_an_installation_with_a_broker(tmp_path: Path) -> None:
    found = checked(tmp_path, **with_sandboxes(builtImages="registry.example.org/tasks"))
    assert found.problems == ()
    assert fields(found.notes) == ["environments[0].sandbox"]
    assert "sandboxes.enabled: true" in found.notes[0].message


@pytest.mark.parametrize("image", ["oci:images:localhost/tasks", "docker-archive:image.tar", "host:/"])
@pytest.mark.parametrize("field", ["image", "builtImages"])
def test_images_of_one_machine_are_no_pods_images(image: str, field: str, tmp_path: Path) -> None:
    found = checked(tmp_path, **with_sandboxes(**{field: image}))
    assert fields(found.problems) == [f"environments[0].sandbox.{field}"]
    assert "kuberoll images build --push" in found.problems[0].message
