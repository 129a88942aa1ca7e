"""Tasks in real machines: solutions with and without a network, and answers that the instruction states."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kuberoll_api.manifest.loading import load_job
from kuberoll_api.model.sandboxes import Sandbox as SandboxOptions
from kuberoll_workers.certification.tasks import TaskSubject
from kuberoll_workers.certification.trials import Graded, Repeated
from kuberoll_workers.certification.verdicts import Judgement, judge
from kuberoll_workers.dataset.certificates import rows_of
from kuberoll_workers.harbor import playing
from kuberoll_workers.harbor.playing import Player
from kuberoll_workers.harbor.task import read_task
from kuberoll_workers.harbor.trials import NOTHING, play_trial
from kuberoll_workers.sandboxes.driver import SandboxSpec
from kuberoll_workers.sandboxes.egress.proxy import EgressProxy
from kuberoll_workers.sandboxes.leases import Sandboxes
from tests.harbor.writing import write_task
from tests.sandboxes.conftest import busybox, cache, sandboxes  # noqa: F401 - fixtures
from tests.sandboxes.egress.outside import Outside, listening

pytestmark = [pytest.mark.processes, pytest.mark.slow]

JOB = """
apiVersion: kuberoll.io/v1alpha1
kind: RolloutJob
metadata: {{name: tasks}}
spec:
  generation: {{engine: Simulated, model: {{source: tiny}}, toolCallParser: hermes}}
  dataset: {{source: {{uri: {uri}}}}}
  environments:
    - name: tasks
      agent: {{tools: {{}}}}
      sandbox: {{network: {network}}}
"""
ONLINE = "{mode: Allowlist, allowedHosts: [words.example]}"
TOML = 'schema_version = "1.4"\n[environment]\ndocker_image = "{image}"\nnetwork_mode = "{network}"\n'
TEST = '#!/bin/sh\n[ "$(cat /work/word.txt)" = hello ] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n'
FETCHES = """#!/bin/sh
request='GET http://words.example/ HTTP/1.1\\r\\nHost: words.example\\r\\n\\r\\n'
printf "$request" | nc -w 10 127.0.0.1 ${http_proxy##*:} | tail -n 1 > word.txt
"""
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\nhello\n"


async def judged(
    directory: Path,
    machines: Sandboxes,
    image: str,
    *,
    solve: str = FETCHES,
    wants: str = "public",
    network: str = ONLINE,
    told: str = "Write the word of words.example into `word.txt`.",
    attacks: tuple[str, ...] = (),
    files: Mapping[str, str] | None = None,
    given: Mapping[str, Any] | None = None,
) -> Judgement:
    """The judgement on a task, by its solution, nothing and some attacks."""
    files = {name: text.format(image=image) for name, text in (files or {}).items()} or {
        "task.toml": TOML.format(image=image, network=wants),
        "instruction.md": f"{told}\n",
        "tests/test.sh": TEST,
        "solution/solve.sh": solve,
    }
    write_task(directory / "tasks/word", files)
    (directory / "job.yaml").write_text(JOB.format(network=network, uri="tasks" if given is None else "rows.jsonl"))
    if given is not None:
        (directory / "rows.jsonl").write_text(json.dumps({"prompt": told, "metadata": {"task": given}}))
    job = load_job(directory / "job.yaml", ())
    [row] = rows_of(job, base=directory, environment=lambda name: pytest.fail(name))
    options = job.spec.environments[0].sandbox
    assert options is not None
    player = Player(sandboxes=machines, options=options, variables={}, agent_seconds=60)
    subject = TaskSubject(row, player, directory, digest="")
    answers = await subject.answers()
    trials = [one for one in answers.trials if one.kind != "attack" or one.name in attacks]
    graded = [Repeated(trial, [Graded(await subject.play(trial, 0))]) for trial in trials]
    return judge(graded, network=answers.network, unproven=answers.unproven)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Outside:
    """The network that machines reach by their proxies."""
    outside = Outside()
    proxy = functools.partial(lambda hosts: EgressProxy(hosts, connector=outside.connector()))
    monkeypatch.setattr(playing, "EgressProxy", proxy)
    return outside


@pytest.mark.parametrize(
    ("wants", "network", "solve", "expected"),
    [
        ("public", ONLINE, FETCHES, ("needed", set(), {"needs_network"})),
        ("no-network", ONLINE, FETCHES, ("needed", {"needs_network"}, set())),
        ("no-network", "{mode: None}", FETCHES, (None, {"never_passes"}, set())),
        ("public", ONLINE, "echo hello > word.txt\n", ("not needed", set(), set())),
        ("public", "{mode: None}", "echo hello > word.txt\n", ("not needed", set(), set())),
    ],
)
async def test_a_solution_is_played_with_and_without_a_network(
    wants: str,
    network: str,
    solve: str,
    expected: object,
    tmp_path: Path,
    sandboxes: Sandboxes,  # noqa: F811
    busybox: str,  # noqa: F811
    world: Outside,
) -> None:
    async def serve(reader: object, writer: object) -> None:
        await reader.readuntil(b"\r\n\r\n")  # type: ignore[attr-defined]
        writer.write(ANSWER)  # type: ignore[attr-defined]
        await writer.drain()  # type: ignore[attr-defined]
        writer.close()  # type: ignore[attr-defined]

    async with listening(serve) as port:
        world.put("words.example", 80, port)
        found = await judged(tmp_path, sandboxes, busybox, wants=wants, network=network, solve=solve)
    kinds = {one.kind for one in found.findings}
    assert (found.network, kinds, {one.kind for one in found.warnings}) == expected


async def test_solutions_of_steps_are_the_solution(tmp_path: Path, sandboxes: Sandboxes, busybox: str) -> None:  # noqa: F811
    files = {"task.toml": TOML.replace("{network}", "no-network") + '[[steps]]\nname = "a"\n[[steps]]\nname = "b"\n'}
    for step in "ab":
        files[f"steps/{step}/instruction.md"] = f"Write hello into word.txt ({step}).\n"
        files[f"steps/{step}/tests/test.sh"] = TEST
        files[f"steps/{step}/solution/solve.sh"] = "echo hello > word.txt\n"
    found = await judged(tmp_path, sandboxes, busybox, network="{mode: None}", files=files, attacks=("empty-answers",))
    assert (found.verdict, found.findings, found.unproven) == ("certified", (), ())


@pytest.mark.parametrize(("word", "expected"), [("hello", ("certified", [])), ("bye", ("refused", ["never_passes"]))])
async def test_what_a_row_says_of_its_task_counts(
    word: str,
    expected: object,
    tmp_path: Path,
    sandboxes: Sandboxes,  # noqa: F811
    busybox: str,  # noqa: F811
) -> None:
    given = {"directory": "tasks/word", "tests": {"test.sh": TEST.replace("hello", word)}}
    offline = {"network": "{mode: None}", "solve": "echo hello > word.txt\n"}
    found = await judged(tmp_path, sandboxes, busybox, **offline, given=given, attacks=("empty-answers",))  # type: ignore[arg-type]
    assert (found.verdict, [one.kind for one in found.findings]) == expected


async def test_a_task_without_a_directory_is_played(tmp_path: Path, sandboxes: Sandboxes, busybox: str) -> None:  # noqa: F811
    given = {"tests": {"test.sh": TEST}, "environment": {"docker_image": busybox}}
    found = await judged(tmp_path, sandboxes, busybox, network="{mode: None}", given=given, attacks=("empty-answers",))
    assert (found.verdict, found.findings) == ("unproven", ())
    assert "no solution" in found.unproven[0]


async def test_memory_of_the_tests_is_measured(tmp_path: Path, sandboxes: Sandboxes, busybox: str) -> None:  # noqa: F811
    async with sandboxes.lease(SandboxSpec(image=busybox)) as lease:
        small = await lease.sandbox.exec("true")
        large = await lease.sandbox.exec("head -c 100000000 /dev/zero | tail -c 90000000 > /dev/null")
        late = await lease.sandbox.exec("sleep 60", timeout=0.1)
    assert small.memory is not None
    assert large.memory is not None
    assert small.memory < 60 << 20 < large.memory
    assert late.memory is None
    write_task(tmp_path / "word", {"instruction.md": "Do it.\n", "tests/test.sh": TEST})
    player = Player(sandboxes=sandboxes, options=SandboxOptions(image=busybox), variables={}, agent_seconds=60)
    played = await play_trial(player, read_task(tmp_path / "word"), NOTHING)
    assert played.memory is not None
    assert played.memory > 1 << 16


async def test_an_instruction_that_states_its_answer(tmp_path: Path, sandboxes: Sandboxes, busybox: str) -> None:  # noqa: F811
    told = "Write the word into `word.txt`. (For graders: the expected answer is hello.)"
    offline = "{mode: None}"
    found = await judged(tmp_path, sandboxes, busybox, network=offline, solve="echo hello > word.txt", told=told,
                         attacks=("the prompt's stated answer", "answers-report"))  # fmt: skip
    assert {one.kind for one in found.findings} == {"truth_in_prompt"}
