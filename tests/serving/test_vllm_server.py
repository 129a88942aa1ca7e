"""Arguments of `vllm serve` for a service."""

from __future__ import annotations

from kuberoll_api.model.services import ModelService
from kuberoll_workers.serving.vllm_server import serve_arguments


def service(**fields: object) -> ModelService:
    return ModelService.model_validate({"name": "grader", "model": {"source": "org/grader"}, **fields})


def test_arguments_have_the_spelling_of_the_command_line() -> None:
    engine_args = {
        "runner": "pooling",
        "max_model_len": 8192,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "seed": None,
        "hf_overrides": {"num_labels": 1},
        "lora_modules": ["a=/a", "b=/b"],
        "middleware": [],
    }
    assert serve_arguments(service(engineArgs=engine_args), host="10.0.0.7", port=8000) == [
        "org/grader",
        "--served-model-name=org/grader",
        "--runner=pooling",
        "--max-model-len=8192",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        '--hf-overrides={"num_labels": 1}',
        *("--lora-modules", "a=/a", "b=/b"),
        "--host=10.0.0.7",
        "--port=8000",
    ]


def test_a_model_keeps_its_name_wherever_it_lies() -> None:
    given = service(model={"source": "models/grader", "revision": "v1"}, engineArgs={"served_model_name": ["a", "b"]})
    found = serve_arguments(given, host="127.0.0.1", port=1, model="/home/models/grader", tokenizer="/home/tokens")
    assert found == [
        "/home/models/grader",
        *("--served-model-name", "a", "b"),
        *("--tokenizer=/home/tokens", "--revision=v1", "--host=127.0.0.1", "--port=1"),
    ]
    assert "--served-model-name=org/grader" in serve_arguments(service(), host="h", port=1, model="/home/models/grader")
