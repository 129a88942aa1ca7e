"""What the documentation shows works as it is shown."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import functools
import inspect
import itertools
import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from kuberoll_api.contract import ENVIRONMENT_ANNOTATION
from kuberoll_api.manifest.documents import parse_documents
from kuberoll_api.model.environments import Environment
from kuberoll_api.model.generation import ModelSource
from kuberoll_api.model.rolloutjob import RolloutJob
from kuberoll_workers.data.causes import REASONS, Evidence, FailureKind
from kuberoll_workers.data.incidents import Incident, Sequel
from kuberoll_workers.data.prompts import SampleGroup
from kuberoll_workers.data.record import TrajectoryRecord
from kuberoll_workers.data.tokenizer import HuggingFaceTokenizer
from kuberoll_workers.environments import GroupMember, GroupScore
from kuberoll_workers.environments.builtin.code.execution import CodeExecutionConfig
from kuberoll_workers.environments.builtin.config import parse_config
from kuberoll_workers.environments.isolation import make_executor
from kuberoll_workers.environments.runner import EnvironmentRunner
from kuberoll_workers.policy.interface import GenerationRequest, SamplingParameters
from kuberoll_workers.rollouts.scheduling import run_rollout
from kuberoll_workers.telemetry import RolloutMetrics
from tests.data.support import model
from tests.environments.calling import Shop
from tests.rollouts.fakes import CharacterTokenizer, CountingEnvironment, ScriptedPolicy, rollout_of, runners, sample

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    str(page.relative_to(ROOT))
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "benchmarks/*.md",
        "charts/*/*.md",
        "examples/models/*/*.md",
        ".github/**/*.md",
    )
    for page in ROOT.glob(pattern)
)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def test_the_chat_template_writes_what_its_model_knows() -> None:
    (given,) = [text for text in blocks("docs/reference/sampling.md", "yaml") if "chatTemplate:" in text]
    (document,) = parse_documents(given)
    own = ModelSource.model_validate(document.value["spec"]["generation"]["model"])
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " 2+2?\n"}]
    assert HuggingFaceTokenizer(model("qwen2.5").hugging_face).with_template(own.chat_template).chat_text(
        chat, generation_prompt=True
    ) == model("qwen2.5").tokenizer.chat_text(chat, generation_prompt=True)


def test_the_agents_of_the_docs_are_those_of_the_examples() -> None:
    examples = [path.read_text() for path in (ROOT / "examples" / "agents").glob("*.py")]
    shown = blocks("docs/how-to/agents.md", "python")
    assert len(shown) == 4
    for code in shown:
        assert any(code in text for text in examples), code


def test_the_readme_s_manifest_is_valid() -> None:
    (text,) = blocks("README.md", "yaml")
    (document,) = parse_documents(text)
    assert RolloutJob.model_validate(document.value).metadata.name == "my-job"


async def test_the_episodes_of_the_docs_can_be_played() -> None:
    code, _ = blocks("docs/reference/episodes.md", "python")
    module = types.ModuleType("walking")
    exec(code, module.__dict__)
    environment = module.__dict__["Walk"]({})
    async with runners({"env": environment}) as made:
        results: list[Any] = []

        async def sink(result: Any) -> None:
            results.append(result)

        policy = ScriptedPolicy(lambda request: "walk")
        await run_rollout(rollout_of(made, policy=policy), [sample(n, metadata={}) for n in range(3)], sink)
    assert [(record.stop_reason, record.total_reward) for record in results] == [("terminated", 1.0)] * 3
    assert environment.left == {}


def test_the_group_of_the_docs_can_be_scored() -> None:
    _, code = blocks("docs/reference/episodes.md", "python")
    module = types.ModuleType("ranking")
    exec(code, module.__dict__)

    def member(number: int, text: str, reward: float) -> GroupMember:
        messages = [{"role": "assistant", "content": text}, {"role": "environment", "content": ""}]
        return GroupMember(
            id=str(number), messages=messages, metadata={"n": number}, reward=reward, stop_reason="terminated"
        )

    members = [member(0, "long", 1.0), member(1, "no", 0.0), member(2, "x", 1.0)]
    long, wrong, short = module.__dict__["Shortest"]().score_group(members)
    assert (long, wrong, short) == (
        GroupScore(reward=0.5, metadata={"n": 0, "rank": 1}), 0.0, GroupScore(reward=1.0, metadata={"n": 2, "rank": 0}),
    )  # fmt: skip


async def test_the_tools_of_the_docs_can_be_called() -> None:
    (code,) = blocks("docs/reference/tools.md", "python")
    module = types.ModuleType("shopping")
    # Its annotations are read from the module.
    sys.modules["shopping"] = module
    try:
        exec(code, module.__dict__)
        shop = module.__dict__["Shop"]({})
    finally:
        del sys.modules["shopping"]
    assert [tool.schema for tool in shop.functions.values()] == [tool.schema for tool in Shop({}).functions.values()]
    (manifest,) = blocks("docs/reference/tools.md", "yaml")
    document = parse_documents(manifest)[0].value
    assert Environment.model_validate(document["environments"][0]).entrypoint == "shopping:Shop"
    assert document["generation"]["toolCallParser"] == "hermes"
    call = {"name": "buy", "arguments": {"item": "pear", "count": 2}}
    policy = ScriptedPolicy(
        lambda request: f"<tool_call>{json.dumps(call)}</tool_call>" if "-1-0" in request.request_id else "Done."
    )
    async with runners({"env": shop}) as made:
        results: list[Any] = []

        async def sink(result: Any) -> None:
            results.append(result)

        rollout = rollout_of(made, policy=policy, sampling=SamplingParameters(max_tokens=200))
        await run_rollout(rollout, [sample(0, metadata={"wanted": {"pear": 2}})], sink)
    assert [(record.stop_reason, record.total_reward) for record in results] == [("terminated", 1.0)]


async def test_the_environment_of_the_docs_can_be_played() -> None:
    (code,) = blocks("docs/reference/environments.md", "python")
    module = types.ModuleType("guessing")
    exec(code, module.__dict__)
    (manifest,) = blocks("docs/reference/environments.md", "yaml")
    (access,) = blocks("docs/reference/isolation.md", "yaml")
    remote, sandboxes, template = blocks("docs/how-to/remote-environments.md", "yaml")
    (code_execution,) = blocks("docs/reference/code-execution.md", "yaml")
    (given,) = parse_documents(manifest)[0].value["environments"]
    spec = Environment.model_validate(given)
    (judge,) = parse_documents(access)[0].value["environments"]
    assert Environment.model_validate(judge).access.variables == ["JUDGE_API_KEY"]
    for block in (remote, sandboxes):
        for served in parse_documents(block)[0].value["environments"]:
            assert Environment.model_validate(served).isolation == "Remote"
    assert f"metadata.annotations['{ENVIRONMENT_ANNOTATION}']" in template
    (graded,) = parse_documents(code_execution)[0].value["environments"]
    assert parse_config(CodeExecutionConfig, Environment.model_validate(graded).config).parallel == 8
    environment = module.__dict__[str(spec.entrypoint).partition(":")[2]](spec.config)
    rows = environment.generate_dataset(4, 6)
    runner = EnvironmentRunner(
        make_executor(lambda: environment, isolation="Inline", processes=1, timeout=5), max_batch=8
    )

    async def guess(row: dict[str, Any], text: str) -> tuple[float, bool, int]:
        log = [*row["messages"], {"role": "assistant", "content": text}]
        outcome = await runner.step(log, row["metadata"])
        assert outcome.metadata is not None
        return outcome.reward, outcome.terminated, outcome.metadata["left"]

    try:
        assert await asyncio.gather(*(guess(row, "7\n") for row in rows)) == [
            (0.0, False, 4), (1.0, True, 4), (0.0, False, 4), (0.0, False, 4),
        ]  # fmt: skip
    finally:
        await runner.close()
    assert environment.global_post_process_and_metrics({"total_reward": [1.0, 0.0]})[1] == {"won": 1}


def test_the_documented_trajectory_has_the_record_s_fields() -> None:
    (text,) = blocks("docs/reference/trajectories.md", "json")
    example = json.loads(text.replace("…, ", "").replace(", …", "").replace("[…]", "[]"))
    # Left out where it says what is usual.
    usual = {"token_source", "tools", "branches", "continuity", "group_order", "sampling", "incidents"}
    assert set(example) == set(TrajectoryRecord.__dataclass_fields__) - usual


async def test_the_loop_can_be_used_as_the_docs_show() -> None:
    (code,) = blocks("docs/explanation/rollouts.md", "python")
    kept: list[int] = []

    def train_on(group: list[TrajectoryRecord]) -> bool:
        kept.extend(record.task_index for record in group[:1])
        return len(kept) == 3

    def groups() -> Iterator[SampleGroup]:
        for index in itertools.count():
            yield SampleGroup(samples=(sample(index, 0), sample(index, 1)), keep=2)

    class Judge(CountingEnvironment):
        def step(self, logs: list[Any], metadata: list[Any]) -> Any:
            # Every other group has one reward for all, and is filtered out.
            rewards = [float(len(log[-1]["content"]) % 2) for log in logs]
            return super().step(logs, metadata)._replace(rewards=rewards)

    def answer(request: GenerationRequest) -> str:
        task, number, *_ = map(int, request.session_id.split("-"))
        return "x" * (1 + number * (task % 2))

    async with runners({"env": Judge()}) as environments:
        given = rollout_of(environments, policy=ScriptedPolicy(answer), concurrency=4)
        names: dict[str, Any] = {
            "policy": ScriptedPolicy(answer),
            "environments": environments,
            "tokenizer": CharacterTokenizer(),
            "settings": given.settings,
            "metrics": RolloutMetrics("docs"),
            "groups": groups(),
            "train_on": train_on,
        }
        compiled = compile(code, "docs/explanation/rollouts.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        running = eval(compiled, names)
        assert inspect.isawaitable(running)
        await running
    assert len(kept) == 3
    assert all(index % 2 for index in kept)
    assert isinstance(names["carry_over"], list)


def test_the_imports_for_users_of_nemo_rl_are_there() -> None:
    before, after = blocks("docs/how-to/nemo-rl.md", "python")[:2]
    names: dict[str, Any] = {}
    exec(after, names)
    imported = [alias.name for line in ast.parse(before).body for alias in getattr(line, "names", ())]
    assert imported
    assert set(imported) == set(names) - {"__builtins__"}


@functools.cache
def collected_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {node.name for node in functions if node.name.startswith("test_")}


@pytest.mark.parametrize("page", PAGES)
def test_tests_that_are_named_exist(page: str) -> None:
    named = re.findall(r"(tests/[\w/.-]+\.py)::(\w+)", (ROOT / page).read_text())
    assert [(path, name) for path, name in named if name not in collected_in(ROOT / path)] == []


def test_every_row_about_nemo_rl_names_a_test() -> None:
    pages = sorted((ROOT / "docs/reference").glob("nemo-rl-*.md"))
    assert len(pages) == 3
    page = "\n".join(path.read_text() for path in pages)
    assert page.count("::test_") >= 80
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| NeMo RL |")]
    assert [row for row in rows if "::test_" not in row.rpartition(" | ")[2]] == []
    assert [row for row in rows if len(row.strip("|").split(" | ")) != 3] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
        assert ((ROOT / page).parent / target).exists(), target


def test_the_index_has_every_page_once() -> None:
    rows = [line for line in (ROOT / "docs/README.md").read_text().splitlines() if line.startswith("- ")]
    linked = [match[1] for row in rows if (match := re.match(r"- \[[^]]+\]\(([^)]+)\)(: \S.*)?$", row))]
    assert len(linked) == len(rows)
    assert len(set(linked)) == len(linked)
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").glob("*/*.md")}
    assert {page for page in linked if not page.startswith("../")} == pages


def test_the_site_has_every_page_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    given = re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", text, flags=re.MULTILINE)
    assert sorted(given) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").glob("**/*.md"))


def test_the_page_of_failures_has_the_table_of_reasons() -> None:
    page = (ROOT / "docs" / "reference" / "failures.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.+) \|$", page, flags=re.MULTILINE)
    assert rows == [(name, reason.kind, reason.words) for name, reason in REASONS.items()]
    assert set(re.findall(r"^\| `(\w+)` \| (?:whose|the|machines|a limit)", page, flags=re.MULTILINE)) == set(
        get_args(FailureKind)
    )
    # What the page says about all of a kind.
    starts_over = {"TokensChanged", "Unexpected"}
    for name, reason in REASONS.items():
        assert reason.keeps_turns == (reason.kind in ("infrastructure", "operator") and name not in starts_over)
    fields = {field.name for field in dataclasses.fields(Evidence)}
    assert fields <= set(re.findall(r"`(\w+)`", page))
    assert {field.name for field in dataclasses.fields(Incident)} <= set(re.findall(r"`(\w+)`", page))
    assert all(f"`{sequel}`" in page for sequel in get_args(Sequel))


GENERATED = {"reference/rolloutjob.md", "reference/metrics.md"}


def test_pages_are_short() -> None:
    pages = {str(page.relative_to(ROOT / "docs")): page for page in (ROOT / "docs").glob("**/*.md")}
    long = {name for name, page in pages.items() if len(page.read_text().split()) > 1500}
    assert long <= GENERATED
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_code_and_tables_are_whole(page: str) -> None:
    lines = (ROOT / page).read_text().splitlines()
    assert sum(line.lstrip().startswith("```") for line in lines) % 2 == 0
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        if line.startswith("|") and not before.startswith("|"):
            assert re.fullmatch(r"\|[-| :]+\|", after), f"a table without a head: {line}"


@pytest.mark.parametrize("page", PAGES)
def test_anchors_lead_somewhere(page: str) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", (ROOT / page).read_text()):
        linked = (ROOT / page).parent / target if target else ROOT / page
        headings = re.findall(r"^#+ (.+)$", linked.read_text(), flags=re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in slugs, f"{target}#{anchor}"


def test_what_is_decided_is_where_the_index_says() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().split("\n## Where is it decided\n")[1].split("\n## ")[0]
    places = re.findall(r"`([\w/]+\.py)` `(\w+(?:\.\w+)?)`", section)
    assert len(places) > 20
    for path, name in places:
        assert name in _names(ast.parse((ROOT / path).read_text())), f"{path} has no {name}"


def _names(module: ast.Module) -> set[str]:
    """Names that a module defines, and `Class.method`."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    stored = {item.id for item in ast.walk(module) if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store)}
    classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
    methods = {f"{node.name}.{item.name}" for node in classes for item in node.body if isinstance(item, functions)}
    return stored | methods | {node.name for node in module.body if isinstance(node, functions | ast.ClassDef)}
