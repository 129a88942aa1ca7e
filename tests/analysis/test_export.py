"""Exported trajectories are what trainers' own loaders read, and lose nothing of what the format has room for."""

from __future__ import annotations

import importlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import orjson
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.analysis.export import writers
from kuberoll_workers.analysis.export.exporting import ExportResult, export_run, run_name
from kuberoll_workers.analysis.export.formats import FORMATS, ExportError
from kuberoll_workers.analysis.export.selection import Selection
from kuberoll_workers.analysis.export.views import token_view
from kuberoll_workers.analysis.paths import OWN_PATH
from kuberoll_workers.data.messages import ExtendedMessage, Message, token_array
from kuberoll_workers.data.record import Timing, TokenCounts, TrajectoryRecord, encode_line
from kuberoll_workers.data.stop_reasons import StopReason
from kuberoll_workers.output.parquet import write_parquet
from kuberoll_workers.output.run_directory import RunManifest
from kuberoll_workers.output.run_files import RunFiles
from tests.data.support import model
from tests.test_docs import blocks

TINY = Path(__file__).parents[2] / "examples" / "models" / "tiny-policy"


def trajectory(
    task_index: int = 0,
    rollout_index: int = 0,
    *,
    reward: float = 1.0,
    turns: int = 2,
    name: str = "puzzle",
    stop_reason: StopReason = "terminated",
    logprobs: bool = True,
    versions: Sequence[str] = (),
) -> TrajectoryRecord:
    """A trajectory of some turns; each has two generated tokens and an observation of three.

    `versions` are those of the generated tokens, two for each turn; none: unknown.
    """
    messages = [
        Message("system", "Play.", token_array()),
        Message("user", "Board", token_array([1, 2, 3, 4])),
    ]
    for turn in range(1, turns + 1):
        numbers = array("f", [-0.1 * turn, -0.25]) if logprobs else None
        sampled = versions[2 * turn - 2 : 2 * turn]
        spans = [(version, place, place + 1) for place, version in enumerate(sampled)] or None
        messages.append(
            Message("assistant", f"move {turn}", token_array([10 + turn, 20]), numbers, turn, spans, sampled=True)
        )
        messages.append(Message("environment", f"board {turn}", token_array([30, 31, 30 + turn]), None, turn))
    return TrajectoryRecord(
        task_index=task_index,
        rollout_index=rollout_index,
        task_name=name,
        idx={"row": task_index},
        messages=messages,
        total_reward=reward,
        rewards=[0.0] * (turns - 1) + [reward] * (turns > 0),
        stop_reason=stop_reason,
        turn_count=turns,
        tokens=TokenCounts(4, 2 * turns, 3 * turns),
        timing=Timing([0.5] * turns, [0.25] * turns),
        metadata={"ground_truth": 42, "moves": turns},
        seed=7,
        attempt=0,
    )


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "Price of an item.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string", "enum": ["pear"]}}},
    },
}


def called(identity: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": "price", "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": identity, "type": "function", "function": function}


CALLING = 'I look.\n<tool_call>\n{"name": "price", "arguments": {"item": "pér"}}\n</tool_call>'


def calling(task_index: int = 0, *, text: bool = True) -> TrajectoryRecord:
    """A trajectory with tools: a call, its answer, a call that cannot be read, its answer, and the last word."""
    fields = {"tool_calls": [called("call00101", item="pér")], **({"text": "I look.\n"} if text else {})}
    unreadable = {"invalid_tool_calls": [{"id": "call00201", "text": "{", "error": "it is not JSON"}]}

    def said(content: str, turn: int, fields: dict[str, Any]) -> Message:
        ids, numbers = token_array([10 + turn, 20]), array("f", [-0.5, -0.25])
        return ExtendedMessage("assistant", content, ids, numbers, turn, fields=fields, sampled=True)

    def answer(content: str, turn: int, identity: str) -> Message:
        fields = {"tool_call_id": identity, "name": "price"}
        return ExtendedMessage("tool", content, token_array([30, 31]), turn=turn, fields=fields)

    record = trajectory(task_index, turns=0)
    messages = [
        *record.messages,
        said(CALLING, 1, fields),
        answer("4", 1, "call00101"),
        said("<tool_call>{", 2, unreadable),
        answer("Error: it is not JSON", 2, "call00201"),
        said("4", 3, {}),
    ]
    return replace(record, messages=messages, turn_count=3, rewards=[0.0, 0.0, 1.0], tools=[TOOL])


SPOKEN = [
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [
            {"id": "call00101", "type": "function", "function": {"name": "price", "arguments": {"item": "pér"}}}
        ],
    },
    {"role": "tool", "content": "4", "tool_call_id": "call00101", "name": "price"},
    {"role": "assistant", "content": "<tool_call>{"},
    {"role": "tool", "content": "Error: it is not JSON", "tool_call_id": "call00201", "name": "price"},
    {"role": "assistant", "content": "4"},
]


def run_of(directory: Path, *records: TrajectoryRecord, shards: int = 2) -> RunFiles:
    directory.mkdir(exist_ok=True)
    for shard in range(shards):
        lines = [encode_line(record) for record in records if record.task_index % shards == shard]
        (directory / f"shard-{shard:05d}.jsonl").write_bytes(b"".join(lines))
    return RunFiles(str(directory))


def export(tmp_path: Path, to: str, *records: TrajectoryRecord, file: str = "", **options: Any) -> ExportResult:
    return export_run(run_of(tmp_path / "run", *records), to=to, output=tmp_path / (file or "out"), **options)


def lines(exported: ExportResult) -> list[dict[str, Any]]:
    return [json.loads(line) for line in exported.path.read_text().splitlines()]


@pytest.mark.parametrize("name", [format.name for format in FORMATS.values() if format.schema is not None])
def test_a_table_has_a_column_for_every_field_of_a_row(name: str) -> None:
    format = FORMATS[name]
    assert format.schema is not None
    for calls, record in ((False, trajectory()), (True, calling())):
        row = format.row(record, "user", OWN_PATH)
        # A field without a column would be left out silently, and a column without a field would be empty.
        assert sorted(format.schema(calls).names) == sorted(row)
        for field in format.schema(calls):
            if pyarrow.types.is_struct(field.type):
                assert {part.name for part in field.type} == set(row[field.name])


def test_openai_chat_has_only_what_the_service_knows(tmp_path: Path) -> None:
    record = trajectory()
    record.messages.insert(1, Message("assistant", "an example", token_array()))
    record.messages.insert(1, Message("developer", "Be brief.", token_array()))
    exported = export(tmp_path, "openai-chat", record)
    assert exported.path == tmp_path / "out" / "run.openai-chat.jsonl"
    assert lines(exported) == [
        {
            "messages": [
                {"role": "system", "content": "Play."},
                {"role": "developer", "content": "Be brief."},
                {"role": "assistant", "content": "an example", "weight": 0},
                {"role": "user", "content": "Board"},
                {"role": "assistant", "content": "move 1"},
                {"role": "user", "content": "board 1"},
                {"role": "assistant", "content": "move 2"},
            ]
        }
    ]
    with pytest.raises(ExportError, match="tool call"):
        export(tmp_path, "openai-chat", record, role="tool")


def test_sharegpt_s_sides_take_turns(tmp_path: Path) -> None:
    record = trajectory()
    record.messages.insert(2, Message("user", "Go on", token_array()))
    (row,) = lines(export(tmp_path, "sharegpt", record, role="tool"))
    assert [(said["from"], said["value"]) for said in row["conversations"]] == [
        ("system", "Play."),
        ("human", "Board\n\nGo on"),
        ("gpt", "move 1"),
        ("observation", "board 1"),
        ("gpt", "move 2"),
    ]
    assert (row["id"], row["reward"], row["environment"]) == ("0-0", 1.0, "puzzle")


@pytest.mark.parametrize("to", ["trl", "sharegpt"])
def test_environments_that_speak_as_a_tool_stay_tools(tmp_path: Path, to: str) -> None:
    record = trajectory()
    record.messages[3].role = "tool"
    (row,) = lines(export(tmp_path, to, record, file="o.jsonl", role="user"))
    if to == "trl":
        assert [said["role"] for said in row["completion"]] == ["assistant", "tool", "assistant"]
    else:
        assert [said["from"] for said in row["conversations"]] == ["system", "human", "gpt", "observation", "gpt"]


@pytest.mark.parametrize("container", ["parquet", "jsonl"])
def test_trl_s_columns_are_token_exact(tmp_path: Path, container: str) -> None:
    datasets = pytest.importorskip("datasets")
    records = [trajectory(0), trajectory(1, reward=-0.5, turns=1)]
    exported = export(tmp_path, "trl", *records, file=f"train.{container}")
    kind = "json" if container == "jsonl" else container
    loaded = datasets.load_dataset(kind, data_files=str(exported.path), split="train", cache_dir=str(tmp_path / "c"))
    first = loaded[0]
    assert first["prompt"] == [{"role": "system", "content": "Play."}, {"role": "user", "content": "Board"}]
    assert [said["role"] for said in first["completion"]] == ["assistant", "user", "assistant"]
    assert first["prompt_ids"] == [1, 2, 3, 4]
    assert first["completion_ids"] == [11, 20, 30, 31, 31, 12, 20]
    assert first["env_mask"] == [1, 1, 0, 0, 0, 1, 1]
    expected = numpy.array([-0.1, -0.25, 0, 0, 0, -0.2, -0.25], dtype=numpy.float32)
    assert numpy.array_equal(numpy.array(first["logprobs"], dtype=numpy.float32), expected)
    assert first["input_ids"] == first["prompt_ids"] + first["completion_ids"]
    assert first["assistant_masks"] == [0, 0, 0, 0, *first["env_mask"]]
    assert loaded["reward"][:] == [1.0, -0.5]
    others = ("environment", "task_index", "rollout_index", "stop_reason")
    assert [first[name] for name in others] == ["puzzle", 0, 0, "terminated"]


def test_verl_s_columns(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    exported = export(tmp_path, "verl", trajectory(3, 1), trajectory(4, logprobs=False), role="tool")
    assert exported.path.name == "run.verl.parquet"
    row, other = sorted(
        datasets.load_dataset("parquet", data_files=str(exported.path), split="train", cache_dir=str(tmp_path / "c")),
        key=lambda row: row["extra_info"]["index"],
    )
    assert (row["data_source"], row["ability"], row["reward_score"]) == ("puzzle", "puzzle", 1.0)
    assert row["reward_model"] == {"style": "rule", "ground_truth": "42"}
    assert json.loads(row["extra_info"]["idx"]) == {"row": 3}
    assert json.loads(row["extra_info"]["metadata"]) == {"ground_truth": 42, "moves": 2}
    assert row["extra_info"]["rewards"] == [0.0, 1.0]
    assert row["extra_info"]["split"] == "train"
    assert row["prompt"][-1] == {"role": "user", "content": "Board"}
    assert [said["role"] for said in row["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert row["response_ids"] == [11, 20, 30, 31, 31, 12, 20]
    assert row["response_mask"] == [1, 1, 0, 0, 0, 1, 1]
    assert row["num_turns"] == 5
    assert other["response_logprobs"] is None


def test_verl_s_own_loaders_read_it(tmp_path: Path) -> None:
    pytest.importorskip("verl", reason="verl is not installed: its requirements exclude this transformers")
    import torch
    from transformers import AutoTokenizer

    OmegaConf = importlib.import_module("omegaconf").OmegaConf
    AgentLoopOutput = importlib.import_module("verl.experimental.agent_loop.agent_loop").AgentLoopOutput
    MultiTurnSFTDataset = importlib.import_module("verl.utils.dataset.multiturn_sft_dataset").MultiTurnSFTDataset
    RLHFDataset = importlib.import_module("verl.utils.dataset.rl_dataset").RLHFDataset
    exported = export(tmp_path, "verl", trajectory(versions=["3", "3", "4", "4"]), trajectory(1))
    tokenizer = AutoTokenizer.from_pretrained(str(TINY))
    config = OmegaConf.create(
        {"cache_dir": str(tmp_path / "cache"), "filter_overlong_prompts": False, "max_prompt_length": 512}
    )
    prompts = RLHFDataset(str(exported.path), tokenizer=tokenizer, config=config)
    assert len(prompts) == 2
    assert prompts[1]["raw_prompt"][-1] == {"role": "user", "content": "Board"}
    assert prompts[1]["index"] == 1
    row = prompts.dataframe[0]
    output = AgentLoopOutput(
        **{name: row[name] for name in AgentLoopOutput.model_fields if name in row}, metrics={}
    ).as_dict()
    assert output["responses"].tolist() == [11, 20, 30, 31, 31, 12, 20]
    assert output["response_mask"].tolist() == [1, 1, 0, 0, 0, 1, 1]
    # The batch's entries by name, from which a trainer drops what is stale; groups by task.
    assert output["extra_fields"]["policy_versions"] == ["3", "3", None, None, None, "4", "4"]
    assert (output["extra_fields"]["min_global_steps"], output["extra_fields"]["max_global_steps"]) == (3, 4)
    advantages, _ = importlib.import_module("verl.trainer.ppo.core_algos").compute_grpo_outcome_advantage(
        token_level_rewards=output["rm_scores"].repeat(2, 1) * torch.tensor([[1.0], [0.0]]),
        response_mask=output["response_mask"].repeat(2, 1),
        index=numpy.array([row["task_index"]] * 2),
    )
    assert advantages[:, 0].tolist() == pytest.approx([0.7071, -0.7071], abs=1e-3)
    sft = MultiTurnSFTDataset(
        str(exported.path), tokenizer=tokenizer, config=OmegaConf.create({"max_length": 256, "truncation": "right"})
    )
    assert len(sft.messages) == 2


def test_nemo_rl_s_rows_become_a_batch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    datasets = pytest.importorskip("datasets")
    from kuberoll_workers.adapters.nemo_rl.message_logs import batched_message_log_to_flat_message

    exported = export(tmp_path, "nemo-rl", trajectory(0), trajectory(1, turns=1, stop_reason="truncated"))
    path = str(exported.path)
    rows = datasets.load_dataset("json", data_files=path, split="train", cache_dir=str(tmp_path / "c"))
    assert rows["idx"][:] == [0, 1]
    assert rows["truncated"][:] == [False, True]
    assert json.loads(rows[0]["extra_env_info"]) == {"ground_truth": 42, "moves": 2}
    assert rows[0]["messages"][-1]["role"] == "assistant"
    assert rows[0]["message_loss_mask"] == [0, 0, 1, 0, 1]
    tensors = {"token_ids": torch.long, "generation_logprobs": torch.float32, "token_loss_mask": torch.long}
    logs = [
        [
            {**message, **{key: torch.tensor(message[key], dtype=dtype) for key, dtype in tensors.items()}}
            for message in row["message_log"]
        ]
        for row in rows
    ]
    flat, lengths = batched_message_log_to_flat_message(logs, pad_value_dict={"token_ids": 99})
    assert lengths.tolist() == rows["length"][:] == [14, 9]
    assert flat["token_ids"][1].tolist() == [1, 2, 3, 4, 11, 20, 30, 31, 31, 99, 99, 99, 99, 99]
    assert flat["token_loss_mask"][0].tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0]
    assert flat["generation_logprobs"].dtype == torch.float32


def with_fields(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages without the nulls of a table's columns."""
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


@pytest.mark.parametrize("text", [True, False])
@pytest.mark.parametrize("to", ["trl", "verl", "nemo-rl"])
@pytest.mark.parametrize("container", ["parquet", "jsonl"])
def test_calls_are_calls_and_tokens_as_without(tmp_path: Path, to: str, container: str, text: bool) -> None:
    """Read by the loader of the trainers, in a file that begins with a trajectory without tools."""
    datasets = pytest.importorskip("datasets")
    if to == "nemo-rl" and container == "parquet":
        pytest.skip("nemo-rl has no Parquet")
    exported = export(tmp_path, to, trajectory(0), calling(2, text=text), file=f"o.{container}")
    assert exported.counts.selected == 2
    kind = "json" if container == "jsonl" else container
    loaded = datasets.load_dataset(kind, data_files=str(exported.path), split="train", cache_dir=str(tmp_path / "c"))
    plain, tools = sorted(loaded, key=lambda row: row["task_index"])
    assert (plain["tools"], tools["tools"]) == (None, [TOOL])
    beginning = [{"role": "system", "content": "Play."}, {"role": "user", "content": "Board"}]
    if to == "trl":
        assert with_fields(tools["prompt"]) == beginning
        assert with_fields(tools["completion"]) == SPOKEN
        assert tools["completion_ids"] == [11, 20, 30, 31, 12, 20, 30, 31, 13, 20]
    else:
        assert with_fields(tools["messages"]) == [*beginning, *SPOKEN]
        assert {message["role"] for message in with_fields(plain["messages"])} == {"system", "user", "assistant"}
    if to == "verl":
        assert tools["response_mask"] == [1, 1, 0, 0, 1, 1, 0, 0, 1, 1]
    if to == "nemo-rl":
        assert tools["message_loss_mask"] == [0, 0, 1, 0, 1, 0, 1]
        assert tools["message_log"][2]["content"] == CALLING


def test_a_file_without_calls_is_as_before(tmp_path: Path) -> None:
    """A null where a call could be is a call to some chat templates."""
    exported = export(tmp_path, "trl", trajectory(), file="o.parquet")
    schema = pyarrow.parquet.read_schema(exported.path)
    assert "tools" not in schema.names
    assert [field.name for field in schema.field("prompt").type.value_type] == ["role", "content"]


@pytest.mark.slow
def test_trl_renders_the_calls_as_they_were_sampled(tmp_path: Path) -> None:
    """By the model's chat template, in TRL's own tokenization of prompt and completion."""
    datasets = pytest.importorskip("datasets")
    apply_chat_template = importlib.import_module("trl").apply_chat_template
    remove_none_values = importlib.import_module("trl.trainer.utils").remove_none_values
    tokenizer = model("qwen2.5").hugging_face
    for container in ("parquet", "jsonl"):
        exported = export(tmp_path, "trl", calling(), file=f"o.{container}")
        kind = "json" if container == "jsonl" else container
        loaded = datasets.load_dataset(
            kind, data_files=str(exported.path), split="train", cache_dir=str(tmp_path / "c")
        )
        row = remove_none_values(loaded[0])
        example = {"prompt": row["prompt"], "completion": row["completion"]}
        rendered = apply_chat_template(example, tokenizer, tools=row["tools"])
        assert '"enum": ["pear"]' in rendered["prompt"]
        assert rendered["completion"].startswith(f"{CALLING}<|im_end|>\n<|im_start|>user\n<tool_response>\n4\n")


def test_openai_chat_has_tools_calls_and_the_answers_to_them(tmp_path: Path) -> None:
    (row,) = lines(export(tmp_path, "openai-chat", calling()))
    assert row["tools"] == [TOOL]
    assert row["messages"][2:] == [
        {"role": "assistant", "content": "I look.", "tool_calls": [called("call00101", item="pér")]},
        {"role": "tool", "tool_call_id": "call00101", "content": "4"},
        {"role": "assistant", "content": "<tool_call>{"},
        # What answers no call of the conversation must not refer to one.
        {"role": "user", "content": "Error: it is not JSON"},
        {"role": "assistant", "content": "4"},
    ]


def test_sharegpt_has_calls_as_text(tmp_path: Path) -> None:
    (row,) = lines(export(tmp_path, "sharegpt", calling()))
    assert row["conversations"][2:4] == [{"from": "gpt", "value": CALLING}, {"from": "observation", "value": "4"}]


VERSIONS = {
    "1 2 2 2": ["1", "2", None, None, None, "2", "2"],
    "b-1 b-2 b-2 b-2": ["b-1", "b-2", None, None, None, "b-2", "b-2"],
    "": [None] * 7,
}


@pytest.mark.parametrize("versions", list(VERSIONS))
@pytest.mark.parametrize("to", ["trl", "verl", "nemo-rl"])
@pytest.mark.parametrize("container", ["parquet", "jsonl"])
def test_formats_that_train_have_the_policy_version_of_every_token(
    tmp_path: Path, to: str, container: str, versions: str
) -> None:
    """Which weights sampled a token, whether the ids are the sampled ones, and the sample's place in its group."""
    datasets = pytest.importorskip("datasets")
    if to == "nemo-rl" and container == "parquet":
        pytest.skip("nemo-rl has no Parquet")
    record = trajectory(5, 2, versions=versions.split())
    other = replace(trajectory(6, 3, versions=["7"] * 4), token_source="reencoded")
    exported = export(tmp_path, to, record, other, file=f"o.{container}")
    kind = "json" if container == "jsonl" else container
    loaded = datasets.load_dataset(kind, data_files=str(exported.path), split="train", cache_dir=str(tmp_path / "c"))
    second, first = sorted(loaded, key=lambda row: -row["task_index"])
    assert [(row["task_index"], row["rollout_index"]) for row in (first, second)] == [(5, 2), (6, 3)]
    numbers = [int(version) for version in versions.split() if version.isdecimal()]
    oldest, newest = (min(numbers), max(numbers)) if numbers else (None, None)
    if to == "trl":
        assert first["policy_versions"] == VERSIONS[versions]
        assert len(first["policy_versions"]) == len(first["completion_ids"])
        assert (first["model_version"], second["model_version"]) == (oldest, 7)
        sources = [row["token_source"] for row in (first, second)]
    elif to == "verl":
        fields = first["extra_fields"]
        assert fields["policy_versions"] == VERSIONS[versions]
        assert (fields["min_global_steps"], fields["max_global_steps"]) == (oldest, newest)
        assert (fields["task_index"], fields["rollout_index"]) == (5, 2)
        sources = [row["extra_fields"]["token_source"] for row in (first, second)]
    else:
        own: Sequence[str | None] = versions.split() or [None] * 4
        assert [message["policy_versions"] for message in first["message_log"]] == [
            [],
            [None] * 4,
            own[:2],
            [None] * 3,
            own[2:],
            [None] * 3,
        ]
        assert (first["weight_version"], second["weight_version"]) == (oldest, 7)
        sources = [row["token_source"] for row in (first, second)]
    assert sources == ["engine", "reencoded"]


def test_the_range_of_versions_is_known_only_if_all_are_numbers() -> None:
    def of(*versions: str) -> tuple[int, int] | None:
        return token_view(trajectory(versions=versions)).version_range()

    assert of("10", "9", "9", "11") == (9, 11)
    assert of("10", "9", "9", "b-11") is None
    assert of("9", "9") is None  # the second turn's are unknown
    assert of("1", "1", "1", "9" * 19) is None
    assert of("-1", "1", "1", "1") is None


@pytest.mark.parametrize("to", FORMATS)
def test_a_simulated_run_is_refused(tmp_path: Path, to: str) -> None:
    files = run_of(tmp_path / "run", trajectory())
    manifest = RunManifest(
        format=1, job="dry", created="", shards=2, identity={"generation.engine": "Simulated"}, inputs={}, versions={}
    )
    (tmp_path / "run" / "manifest.json").write_bytes(orjson.dumps(manifest))
    with pytest.raises(ExportError, match=r"/run: a run of the Simulated engine: .*--allow simulated"):
        export_run(files, to=to, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert export_run(files, to=to, output=tmp_path / "out", allow_simulated=True).counts.selected == 1
    manifest.identity["generation.engine"] = "VLLM"
    (tmp_path / "run" / "manifest.json").write_bytes(orjson.dumps(manifest))
    assert export_run(files, to=to, output=tmp_path / "out", force=True).counts.selected == 1


def test_selection(tmp_path: Path) -> None:
    records = [
        trajectory(0, 0, reward=0.5),
        trajectory(0, 1, reward=1.0),
        trajectory(0, 2, reward=1.0),
        trajectory(2, 0, reward=-1.0),
        trajectory(4, 0, name="math", stop_reason="max_turns"),
        trajectory(6, 0, turns=0, stop_reason="truncated"),
    ]

    def keys(**selection: Any) -> list[tuple[int, int]]:
        exported = export(tmp_path, "trl", *records, file="o.jsonl", selection=Selection(**selection), force=True)
        return [(row["task_index"], row["rollout_index"]) for row in lines(exported)]

    assert keys() == [(0, 0), (0, 1), (0, 2), (2, 0), (4, 0)]
    assert keys(best_of_group=True) == [(0, 1), (2, 0), (4, 0)]
    assert keys(min_reward=0.5, environments=frozenset({"puzzle"})) == [(0, 0), (0, 1), (0, 2)]
    assert keys(stop_reasons=frozenset({"max_turns"})) == [(4, 0)]
    assert keys(limit=2) == [(0, 0), (0, 1)]
    exported = export(
        tmp_path,
        "trl",
        *records,
        file="o.jsonl",
        selection=Selection(stop_reasons=frozenset({"max_turns"})),
        force=True,
    )
    assert exported.counts.left_out == {"of another stop reason": 5}
    exported = export(
        tmp_path, "sharegpt", *records, selection=Selection(best_of_group=True, environments=frozenset({"puzzle"}))
    )
    assert exported.counts.selected == 2
    assert exported.counts.left_out == {
        "not the best of its group": 2, "of another environment": 1, "without a response": 1,
    }  # fmt: skip


def test_a_file_is_never_replaced_unasked(tmp_path: Path) -> None:
    exported = export(tmp_path, "sharegpt", trajectory())
    before = exported.path.read_bytes()
    with pytest.raises(ExportError, match="--force"):
        export(tmp_path, "sharegpt", trajectory(reward=0.0))
    assert exported.path.read_bytes() == before
    export(tmp_path, "sharegpt", trajectory(reward=0.0), force=True)
    assert exported.path.read_bytes() != before


@pytest.mark.parametrize("to", ["trl", "sharegpt"])
def test_an_export_that_fails_leaves_nothing(tmp_path: Path, to: str) -> None:
    files = run_of(tmp_path / "run", trajectory())
    (tmp_path / "run" / "shard-00001.parquet").write_bytes(b"{}\n")
    with pytest.raises(ValueError, match=r"shard-00001.parquet: not a Parquet file"):
        export_run(files, to=to, output=tmp_path / "out")
    assert list((tmp_path / "out").glob("*")) == []


def test_an_export_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    files = run_of(tmp_path / "run", trajectory())
    shard = tmp_path / "run" / "shard-00001.parquet"
    write_parquet(shard, [trajectory(1)])
    # The keys can be read, the messages can not.
    group = parquet.ParquetFile(shard).metadata.row_group(0)
    (column,) = [
        group.column(n) for n in range(group.num_columns) if group.column(n).path_in_schema.endswith("content")
    ]
    with shard.open("r+b") as file:
        file.seek(column.dictionary_page_offset)
        file.write(b"\xff" * column.total_compressed_size)
    with pytest.raises((ValueError, OSError)):
        export_run(files, to="trl", output=tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"sharegpt comes in files that end in \.jsonl"):
        export(tmp_path, "sharegpt", trajectory(), file="train.parquet")
    with pytest.raises(ExportError, match="environment maths; the run has puzzle"):
        export(tmp_path, "trl", trajectory(), selection=Selection(environments=frozenset({"maths"})))
    with pytest.raises(ExportError, match=r"--to parquet: unknown format; installed formats are areal, .*trl"):
        export(tmp_path, "parquet", trajectory())
    with pytest.raises(ExportError, match=r"no trajectory is selected \(1 of less reward\)"):
        export(tmp_path, "trl", trajectory(), selection=Selection(min_reward=2.0))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_sft_trainer_trains_on_the_policy_s_own_tokens(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    trl = pytest.importorskip("trl")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported = export(tmp_path, "trl", trajectory(0), trajectory(1))
    loaded = datasets.load_dataset(
        "parquet", data_files=str(exported.path), split="train", cache_dir=str(tmp_path / "c")
    )
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path / "trained"), max_steps=1, per_device_train_batch_size=2, report_to="none",
        save_strategy="no", use_cpu=True, bf16=False,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(str(TINY)),
        args=arguments,
        train_dataset=loaded,
        processing_class=AutoTokenizer.from_pretrained(str(TINY)),
    )
    assert trainer.train_dataset[0]["input_ids"] == loaded[0]["input_ids"]
    assert trainer.train_dataset[0]["labels"] == [-100] * 4 + [11, 20, -100, -100, -100, 12, 20]
    assert numpy.isfinite(trainer.train().training_loss)


@pytest.mark.slow
def test_the_documented_replay_has_groups_of_one_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tasks with one text, as with hidden state; docs/reference/export-formats.md trains on each."""
    pytest.importorskip("datasets")
    trl = pytest.importorskip("trl")

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.chdir(tmp_path)
    records = [
        # Rewards that all differ by 10 or more between tasks: a mixed group has another spread.
        *(trajectory(task, index, reward=10.0 * task + index) for task in (0, 1, 4) for index in range(3)),
        trajectory(2, 0),
        *(replace(trajectory(3, index), token_source="reencoded") for index in range(3)),
    ]
    export(tmp_path, "trl", *records, file="run.trl.parquet")
    replayed: list[tuple[int, int]] = []
    rewarded: list[list[float]] = []

    class Recording(trl.GRPOTrainer):  # type: ignore[misc,name-defined]
        def __init__(self, *, rollout_func: Any, reward_funcs: Any, **options: Any) -> None:
            def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
                output: dict[str, Any] = rollout_func(prompts, trainer)
                replayed.extend(zip(output["task_index"], output["rollout_index"], strict=True))
                return output

            def reward(**given: Any) -> list[float]:
                rewarded.append(reward_funcs(**given))
                return rewarded[-1]

            super().__init__(rollout_func=rollout, reward_funcs=reward, **options)

    monkeypatch.setattr(trl, "GRPOTrainer", Recording)
    (code,) = [block for block in blocks("docs/reference/export-formats.md", "python") if "GRPOTrainer(" in block]
    for shown, used in (
        ("samples = 8", "samples = 3"),
        ('"Qwen/Qwen2.5-1.5B-Instruct"', repr(str(TINY))),
        ("GRPOConfig(", 'GRPOConfig(max_steps=3, use_cpu=True, bf16=False, report_to="none", save_strategy="no", '),
    ):
        assert code.count(shown) == 1
        code = code.replace(shown, used)
    exec(compile(code, "docs/reference/export-formats.md", "exec"), {})
    groups = [replayed[place : place + 3] for place in range(0, len(replayed), 3)]
    assert {group[0][0] for group in groups} == {0, 1, 4}
    assert all(sorted(group) == [(group[0][0], index) for index in range(3)] for group in groups)
    assert all(max(rewards) - min(rewards) == 2.0 for rewards in rewarded)


@given(
    turns=st.lists(
        st.tuples(st.lists(st.integers(0, 2**31 - 1)), st.lists(st.integers(0, 2**31 - 1))), min_size=1, max_size=5
    ),
    prompt=st.lists(st.integers(0, 2**31 - 1)),
)
def test_tokens_are_those_of_the_messages_to_the_last_response(
    turns: list[tuple[list[int], list[int]]], prompt: list[int]
) -> None:
    record = trajectory(turns=0)
    record.messages[1].token_ids = token_array(prompt)
    for number, (response, observation) in enumerate(turns, start=1):
        numbers = array("f", [-1.0] * len(response))
        record.messages.append(Message("assistant", "", token_array(response), numbers, number, sampled=True))
        record.messages.append(Message("environment", "", token_array(observation), None, number))
    view = token_view(record)
    everything = [token for message in record.messages[:-1] for token in message.token_ids]
    assert [*view.prompt_ids, *view.completion_ids] == everything
    assert view.logprobs is not None
    assert len(view.completion_ids) == len(view.mask) == len(view.logprobs)
    generated = [token for token, own in zip(view.completion_ids, view.mask, strict=True) if own]
    assert generated == [token for response, _ in turns for token in response]
    assert all(number == (-1.0 if own else 0.0) for number, own in zip(view.logprobs, view.mask, strict=True))


@pytest.mark.parametrize(
    ("job", "name"), [("../escaped", "escaped"), ("/etc/x", "etc-x"), ("..", "trajectories"), ("a b\x1b", "a-b")]
)
def test_a_manifest_s_name_is_never_a_path(job: str, name: str, tmp_path: Path) -> None:
    files = run_of(tmp_path / "run", trajectory())
    manifest = RunManifest(format=1, job=job, created="", shards=2, identity={}, inputs={}, versions={})
    (tmp_path / "run" / "manifest.json").write_bytes(orjson.dumps(manifest))
    assert run_name(files) == name


def test_row_groups_are_bounded_by_rows_and_by_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "_ROWS", 3)
    monkeypatch.setattr(writers, "_NUMBERS", 10)
    sizes = [0, 1, 1, 4, 5, 1, 20, 9, 1, 1]
    rows: list[dict[str, Any]] = [{"ids": [0] * size, "more": array("f", []), "text": "x" * 99} for size in sizes]
    groups = [[len(row["ids"]) for row in group] for group in writers._row_groups(iter(rows))]
    assert groups == [[0, 1, 1], [4, 5, 1], [20], [9, 1], [1]]
    assert list(writers._row_groups(iter(()))) == []
    (group,) = writers._row_groups(iter([{"ids": [0] * 9}, {"ids": [0]}]))
    assert len(group) == 2


def test_nothing_at_all_is_said(tmp_path: Path) -> None:
    run_of(tmp_path / "run")
    with pytest.raises(ExportError, match=r"/run: no trajectory is selected \(there are none\); nothing was written$"):
        export(tmp_path, "sharegpt")


@pytest.mark.parametrize("container", ["jsonl", "parquet"])
def test_a_file_that_cannot_be_written_is_named_with_the_reason(tmp_path: Path, container: Any) -> None:
    schema = pyarrow.schema([("a", pyarrow.int64())])
    path = tmp_path / ("a" * 250)
    with pytest.raises(ExportError, match=f"^{path}: File name too long$"):
        writers.write_rows(path, [{"a": 1}], container=container, schema=schema)
    (tmp_path / "file").touch()
    with pytest.raises(ExportError, match=f"^{tmp_path}/file/rows: "):
        writers.write_rows(tmp_path / "file" / "rows", [{"a": 1}], container=container, schema=schema)
    assert [found.name for found in tmp_path.iterdir()] == ["file"]
