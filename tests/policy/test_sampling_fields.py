"""Each sampling field of the table reaches every engine and every record, or is refused; nothing lists them anew."""

from __future__ import annotations

import ast
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic.alias_generators import to_camel

from kuberoll_api.model.generation import Sampling, SimulatedEngine
from kuberoll_api.model.sampling_fields import AT_ZERO, CORE, SAMPLING_FIELDS
from kuberoll_workers.adapters.nemo_gym_rollouts import _params
from kuberoll_workers.data.sampling import distribution_of
from kuberoll_workers.dataset.rows import RowPosition, parse_row
from kuberoll_workers.output.identity import settled
from kuberoll_workers.policy import wire
from kuberoll_workers.policy.external.fields import openai_fields, sglang_fields
from kuberoll_workers.policy.external.sglang import generate_body
from kuberoll_workers.policy.interface import (
    GenerationRequest,
    PolicyRefused,
    SamplingParameters,
    StructuredOutputs,
)
from kuberoll_workers.rollouts.settings import job_sampling, sampling_of
from kuberoll_workers.serving.engines.simulated import Simulated
from kuberoll_workers.serving.sessions.limits import _fields

ROOT = Path(__file__).resolve().parent.parent.parent
# Settings of the manifest alone: of which settings apply, and a name for a temperature of 0.
OF_THE_MANIFEST = {"override", "greedy"}
TINY = str(ROOT / "examples/models/tiny-policy")
ROOM = 50
PLAIN = SamplingParameters(max_tokens=ROOM)
TOLD: dict[str, Any] = {
    "max_tokens": 7, "stop": ("up",), "seed": 7, "stop_token_ids": (3,),
    "structured_outputs": StructuredOutputs(regex="a"),
}  # fmt: skip


def told(name: str) -> Any:
    """A value of a field that is not its default."""
    field = SAMPLING_FIELDS[name]
    by_type = {float: 0.5, int: 2, bool: True}
    return TOLD[name] if name in TOLD else by_type[type(field.default)]


def plain(name: str) -> Any:
    """The same as plain data."""
    return msgspec.json.decode(msgspec.json.encode(told(name)))


def asking(name: str) -> SamplingParameters:
    return msgspec.structs.replace(PLAIN, **{name: told(name)})


def request(sampling: SamplingParameters) -> GenerationRequest:
    return GenerationRequest(request_id="r", session_id="s", token_ids=array("i", [1, 2]), sampling=sampling)


KINDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum"}


def simulated(**settings: Any) -> Simulated:
    return Simulated(model=TINY, tokenizer=TINY, settings=SimulatedEngine.model_validate(settings), engine_args={})


each_field = pytest.mark.parametrize("name", SAMPLING_FIELDS)


def test_manifests_requests_and_the_table_have_the_same_fields() -> None:
    assert set(SAMPLING_FIELDS) == set(Sampling.model_fields) - OF_THE_MANIFEST
    assert set(SAMPLING_FIELDS) == set(SamplingParameters.__struct_fields__)


@each_field
def test_manifests_and_requests_have_the_table_s_defaults_and_bounds(name: str) -> None:
    field = SAMPLING_FIELDS[name]
    default = getattr(Sampling(), name)
    assert (tuple(default) if isinstance(default, list) else default) == field.default
    given = [(bound, getattr(item, bound, None)) for item in Sampling.model_fields[name].metadata for bound in KINDS]
    assert {bound: value for bound, value in given if value is not None} == field.bounds
    if name != "max_tokens":
        assert getattr(PLAIN, name) == field.default
        schema = msgspec.json.schema(SamplingParameters)["$defs"]["SamplingParameters"]["properties"][name]
        choices = schema.get("anyOf", [schema])
        for bound, value in field.bounds.items():
            assert any(choice.get(KINDS[bound]) == value for choice in choices), (bound, schema)


@each_field
def test_a_row_may_set_it_in_either_spelling(name: str) -> None:
    value = plain(name)
    for spelling in (name, to_camel(name)):
        given = {"prompt": "x", "sampling": {spelling: value}}
        row = parse_row(given, place=RowPosition("rows[", 0, "]"), task_names=["a"], template=None)
        if name == "seed":
            # Each sample has one of its own, drawn from it.
            assert row.seed == value
            continue
        assert getattr(sampling_of(PLAIN, row.sampling), name) == told(name)


@each_field
def test_a_job_s_setting_is_that_of_its_requests(name: str) -> None:
    value = plain(name)
    job = job_sampling(Sampling.model_validate({to_camel(name): value}))
    assert getattr(job, name) == (None if name == "seed" else told(name))


@each_field
def test_our_engines_are_asked_for_it(name: str) -> None:
    kind, (_, body) = wire.MSGPACK, ("", wire.encode_request(request(asking(name)), wire.MSGPACK))
    assert getattr(wire.decode_request(body, kind).sampling, name) == told(name)
    assert asking(name).within(ROOM)[name] != PLAIN.within(ROOM)[name] or name == "max_tokens"


@each_field
def test_settings_are_written_alike_wherever_they_came_from(name: str) -> None:
    """Digests of them are stored with turns."""
    job, default = job_sampling(Sampling()), SAMPLING_FIELDS[name].default
    if default is not None:
        value = float(str(default)) if isinstance(default, float) else default
        same = sampling_of(job, {name: value})
        assert msgspec.json.encode(same) == msgspec.json.encode(sampling_of(job, {name: default}))
        assert msgspec.json.encode(same) == msgspec.json.encode(job)
    if name != "seed":
        assert msgspec.json.encode(sampling_of(job, {name: plain(name)})) != msgspec.json.encode(job)


@pytest.mark.slow
def test_vllm_is_asked_for_each() -> None:
    pytest.importorskip("vllm")
    from kuberoll_workers.serving.engines.simulated_core import _sampling
    from kuberoll_workers.serving.engines.vllm_engine import _sampling_params

    for name in SAMPLING_FIELDS:
        room = told(name) if name == "max_tokens" else ROOM
        params, usual = _sampling_params(asking(name), room), _sampling_params(PLAIN, ROOM)
        assert getattr(params, name) != getattr(usual, name), name
        # And the simulated core, which stands in for vLLM's, has it from there.
        if name != "structured_outputs":
            assert getattr(_sampling(params), name) == told(name), name


@each_field
async def test_the_simulated_engine_honors_all_but_what_shapes_a_distribution(name: str) -> None:
    engine = simulated(**({"responses": ["go up and on"]} if name == "stop" else {"meanTokens": 30}))
    await engine.start()
    usual = msgspec.structs.replace(PLAIN, seed=3)
    answer = await engine.generate(request(usual))
    value = (int(answer.token_ids[2]),) if name == "stop_token_ids" else told(name)
    value = len(answer.token_ids) + 5 if name == "min_tokens" else value
    changed = await engine.generate(request(msgspec.structs.replace(usual, **{name: value})))
    honored = not SAMPLING_FIELDS[name].shapes or name == "min_tokens"
    assert (changed.token_ids != answer.token_ids) == honored


@each_field
def test_servers_of_others_are_asked_for_it_or_it_is_refused(name: str) -> None:
    field = SAMPLING_FIELDS[name]
    room = told(name) if name == "max_tokens" else ROOM
    expected = list(told(name)) if isinstance(told(name), tuple) else told(name)
    assert openai_fields(asking(name), room, extended=True)[name] == expected
    if field.openai:
        assert openai_fields(asking(name), room, extended=False)[name] == expected
    else:
        assert name not in openai_fields(PLAIN, ROOM, extended=False)
        with pytest.raises(PolicyRefused, match=rf"sampling\.{to_camel(name)}: the server accepts only OpenAI's own"):
            openai_fields(asking(name), room, extended=False)
    if name == "structured_outputs":
        assert generate_body(request(asking(name)), room=ROOM)["sampling_params"]["regex"] == "a"
    else:
        assert sglang_fields(asking(name), room)[field.sglang or name] == expected


def test_what_means_all_tokens_is_sent_in_one_way() -> None:
    """SGLang takes 0 for a mistake."""
    sampling = msgspec.structs.replace(PLAIN, top_k=0)
    assert openai_fields(sampling, ROOM, extended=True)["top_k"] == sglang_fields(sampling, ROOM)["top_k"] == -1
    assert "top_k" not in openai_fields(sampling, ROOM, extended=False)


@each_field
def test_agents_have_it(name: str) -> None:
    params = _params({}, asking(name), seed=told("seed"))
    extra = msgspec.json.decode((params.get("metadata") or {}).get("extra_body", "{}"))
    expected = plain(name)
    asked = {"max_tokens": params["max_output_tokens"], **params, **extra}
    assert (list(asked[name]) if isinstance(asked[name], tuple) else asked[name]) == expected
    if name != "seed":
        # A session counts its calls, and gives each a seed of its own.
        fields = _fields("/v1/chat/completions", asking(name))
        assert {"max_tokens": fields["max_completion_tokens"], **fields}[name] == expected
    assert name not in CORE or name in _fields("/v1/responses", PLAIN)


@each_field
def test_what_shapes_a_distribution_is_recorded(name: str) -> None:
    recorded, usual = distribution_of(asking(name)), distribution_of(PLAIN)
    assert (recorded != usual) == SAMPLING_FIELDS[name].shapes
    assert (name in usual) == (name in CORE)


@pytest.mark.parametrize(
    "name", [name for name, field in SAMPLING_FIELDS.items() if field.shapes and name != "temperature"]
)
def test_what_has_no_effect_at_temperature_0_makes_no_other_run_or_distribution(name: str) -> None:
    greedy = msgspec.structs.replace(PLAIN, temperature=0.0)
    other = msgspec.structs.replace(asking(name), temperature=0.0)
    assert (distribution_of(other) == distribution_of(greedy)) == (name in AT_ZERO)
    path = f"generation.sampling.{to_camel(name)}"
    temperature = {"generation.sampling.temperature": 0}
    same = settled({**temperature, path: told(name)}) == settled({**temperature, path: SAMPLING_FIELDS[name].default})
    assert same == (name in AT_ZERO)


# Beside the table: the forms that some of all fields take elsewhere, the three that the Responses API has, what others
# call them (the configuration of NeMo RL, the API of NeMo Gym), and the requests of an engine's own check.
EXEMPT = {
    "model/sampling_fields.py", "policy/interface.py", "engines/simulated_core.py", "adapters/nemo_gym_rollouts.py",
    "nemo_rl/gym.py", "nemo_rl/served.py", "engines/vllm_prober.py",
}  # fmt: skip


def lists_of_their_own(source: str) -> Iterator[tuple[int, str]]:
    """Lines that name three or more fields in a collection or in the arguments of a call."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.expr):
            continue
        named: list[Any] = []
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            named = [item.value for item in node.elts if isinstance(item, ast.Constant)]
        elif isinstance(node, ast.Dict):
            named = [key.value for key in node.keys if isinstance(key, ast.Constant)]
        elif isinstance(node, ast.Call):
            named = [keyword.arg for keyword in node.keywords]
        if len(set(SAMPLING_FIELDS) & set(named)) > 2 + isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node)[:200]


def test_no_module_lists_the_fields_anew() -> None:
    assert [*lists_of_their_own('X = {"temperature": 1, "top_p": 1, "min_p": 0}')]
    found = {
        str(path.relative_to(ROOT)): lines
        for folder in ("crds", "operator", "workers")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (lines := [*lists_of_their_own(path.read_text())])
    }
    exempt = {name for name in found if name.endswith(tuple(EXEMPT))}
    wrong = {name: lines for name, lines in found.items() if name not in exempt}
    assert not wrong, f"ask kuberoll_api.model.sampling_fields instead: {wrong}"
    assert len(exempt) == len(EXEMPT), "an exemption that nothing needs"
