"""What the host decides without starting anything."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kuberoll_api.rolloutjob import Generation
from kuberoll_workers.policy.app import AppArgs, app_args, deployment_options
from kuberoll_workers.policy.engines.vllm_engine import check_argument_names, engine_arguments
from kuberoll_workers.policy.host import free_ports, root_cause, serve_environment


def test_root_cause_is_the_engine_s_own_line() -> None:
    log = """
Traceback (most recent call last):
  File "x.py", line 1, in <module>
    raise ValueError("bad")
(EngineCore pid=1) ValueError: Model architectures ['X'] are not supported
RuntimeError: Engine core initialization failed. See root cause above.
"""
    assert root_cause([log]) == "ValueError: Model architectures ['X'] are not supported"
    assert root_cause(["all is well"]) is None


def test_settings_for_several_gpus() -> None:
    generation = Generation.model_validate(
        {"model": {"source": "m"}, "resources": {"limits": {"nvidia.com/gpu": "2"}}, "replicas": 3}
    )
    args = app_args(generation, model="m", tokenizer="t")
    options = deployment_options(args)
    assert options["ray_actor_options"]["num_gpus"] == 2
    assert options["num_replicas"] == 3
    assert msgspec.convert(msgspec.to_builtins(args), AppArgs) == args


def test_simulated_engines_take_no_gpu() -> None:
    generation = Generation.model_validate(
        {"model": {"source": "m"}, "engine": "Simulated", "resources": {"limits": {"nvidia.com/gpu": 1}}}
    )
    assert app_args(generation, model="m", tokenizer="t").gpus == 0


def test_what_the_user_sets_wins() -> None:
    arguments = engine_arguments({"block_size": 64}, model="m", tokenizer="t", revision=None, cpu=True)
    assert (arguments["block_size"], arguments["enforce_eager"]) == (64, True)
    assert "enforce_eager" not in engine_arguments({}, model="m", tokenizer="t", revision=None, cpu=False)


def test_misspelled_engine_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"engineArgs\.max_model_length: .* did you mean max_model_len\?"):
        check_argument_names({"max_model_length": 1}, {"max_model_len", "dtype"})


def test_two_runs_share_neither_ports_nor_files(tmp_path: Path) -> None:
    first = serve_environment("Session", tmp_path / "a", free_ports(3))
    second = serve_environment("LeastLoaded", tmp_path / "b", free_ports(3))
    for name in first:
        if name.endswith(("_PORT", "_LOC", "_PATH", "_BASE", "_FILE")):
            assert first[name] != second[name], name
    assert first["RAY_SERVE_HAPROXY_BALANCE_ALGORITHM"] == "hdr(x-session-id)"
    assert second["RAY_SERVE_HAPROXY_BALANCE_ALGORITHM"] == "leastconn"
