"""What the host decides without starting anything."""

from __future__ import annotations

import dataclasses
import json
import resource
import signal
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kuberoll_api.contract import ServeArgs, weights_source
from kuberoll_api.model.generation import Generation, Weights
from kuberoll_workers.serving import ray_settings
from kuberoll_workers.serving.app import (
    build,
    deployment_options,
    max_replicas,
    read_args,
    replica_gpus,
)
from kuberoll_workers.serving.engines.registry import engine_kind
from kuberoll_workers.serving.engines.vllm_engine import check_argument_names, engine_arguments
from kuberoll_workers.serving.engines.vllm_kind import placed_engine_args
from kuberoll_workers.serving.host_config import requested_gpus
from kuberoll_workers.serving.ray_settings import (
    HAPROXY_OPEN_FILES,
    free_ports,
    haproxy_problem,
    ray_environment,
    serve_environment,
)
from kuberoll_workers.serving.root_cause import death_by_signal, root_cause

ENGINE_LOG = """\
:actor_name:ServeReplica:kuberoll:Generation
Process EngineCore:
Traceback (most recent call last):
  File "core.py", line 1, in __init__
    check()
    ^^^^^^^
ValueError: No available memory for the cache blocks.
Traceback (most recent call last):
  File "app.py", line 2, in start
    engine = make()
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""

CONTROLLER_LOG = """\
ERROR 2026-01-01 10:00:00,000 controller 1 -- Exception in Replica(id='x'), the replica will be stopped.
Traceback (most recent call last):
  File "replica.py", line 3, in initialize
    await start()
RuntimeError: Traceback (most recent call last):
  File "config.py", line 4, in create
    return Config()
KeyError: 'nope'

During handling of the above exception, another exception occurred:

  File "config.py", line 5, in create
    raise
Traceback (most recent call last):
  File "dataclasses.py", line 6, in __init__
    validate()
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, model type `nope` is not known.

Update Transformers. [type=value_error]
    For further information visit https://errors.pydantic.dev/2/v/value_error
ERROR 2026-01-01 10:00:00,000 controller 1 -- Failed to update the deployments ['Generation'].
"""


def test_the_cause_is_the_last_exception_with_all_its_lines() -> None:
    assert root_cause([CONTROLLER_LOG, ENGINE_LOG]) == (
        "ValidationError: 1 validation error for ModelConfig Value error, model type `nope` is not known. "
        "Update Transformers. [type=value_error]"
    )


def test_the_cause_is_no_consequence_of_another() -> None:
    failed = "Traceback (most recent call last):\n  ...\nRuntimeError: Deploying application kuberoll failed: x\n"
    assert root_cause([failed, ENGINE_LOG]) == "ValueError: No available memory for the cache blocks."
    assert root_cause([failed, "all is well: TypeError: mentioned\n"]) is None
    assert root_cause(["Traceback (most recent call last):\n"]) is None
    assert root_cause(["Traceback (most recent call last):\n  ...\nMemoryError\n"]) == "MemoryError:"


FIRST_REQUEST_LOG = """\
:actor_name:ServeController
ERROR 2026-01-01 10:00:00,000 controller 1 -- Exception in Replica(id='x'), the replica will be stopped.
Traceback (most recent call last):
  File "vllm_engine.py", line 1, in generate
    async for output in engine.generate(
vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "app.py", line 2, in __init__
    await self._engine.start()
kuberoll_workers.policy.interface.PolicyUnavailable: the engine's process EngineCore was killed by signal 4 (SIGILL)
"""


def test_an_engine_that_a_signal_ended_says_so() -> None:
    failed = "Traceback (most recent call last):\n  ...\nRuntimeError: Deploying application kuberoll failed: x\n"
    assert root_cause([FIRST_REQUEST_LOG, failed]) == (
        "PolicyUnavailable: the engine's process EngineCore was killed by signal 4 (SIGILL)"
    )


@pytest.mark.parametrize(
    ("codes", "words"),
    [
        (
            {"EngineCore": -9},
            "EngineCore was killed by signal 9 (SIGKILL); most often by the kernel, out of memory",
        ),
        ({"EngineCore": -4}, "signal 4 (SIGILL); the processor lacks an instruction"),
        ({"EngineCore_DP0": -15, "EngineCore_DP1": -11}, "EngineCore_DP1 was killed by signal 11 (SIGSEGV)"),
        ({"EngineCore": -99}, "killed by signal 99"),
    ],
)
def test_signals_have_names_and_hints(codes: dict[str, int | None], words: str) -> None:
    assert words in (death_by_signal(codes) or "")


@pytest.mark.parametrize("codes", [{}, {"EngineCore": 1}, {"EngineCore": None}, {"EngineCore": 0}])
def test_what_no_signal_ended_has_a_cause_of_its_own(codes: dict[str, int | None]) -> None:
    assert death_by_signal(codes) is None


def app(**fields: Any) -> ServeArgs:
    generation = Generation.model_validate({"model": {"source": "m"}, **fields})
    return ServeArgs.of(generation, model="/models/m", tokenizer="/models/t", gpus=requested_gpus(generation))


def test_arguments_survive_serve_s_configuration() -> None:
    own = {"source": "m", "chatTemplate": "{{ messages }}", "chatTemplateKwargs": {"a": True}}
    args = app(engineArgs={"max_model_len": 512}, replicas=3, model=own)
    assert (args.chat_template, args.chat_template_kwargs) == ("{{ messages }}", {"a": True})
    assert read_args(json.loads(json.dumps(msgspec.to_builtins(args)))) == args
    assert deployment_options(args, gpus=2)["num_replicas"] == 3
    assert deployment_options(args, gpus=2)["ray_actor_options"]["num_gpus"] == 2


@pytest.mark.parametrize(
    ("generation", "gpus"),
    [
        ({}, 1),
        ({"engineArgs": {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}}, 8),
        ({"engineArgs": {"tensor_parallel_size": 4}, "resources": {"limits": {"nvidia.com/gpu": "2"}}}, 2),
        ({"gpusPerReplica": 0.5, "resources": {"limits": {"nvidia.com/gpu": "2"}}}, 0.5),
    ],
)
def test_gpus_of_a_replica(generation: dict[str, Any], gpus: float) -> None:
    assert replica_gpus(app(**generation), on_gpus=True) == gpus
    assert replica_gpus(app(**generation), on_gpus=False) == 0


def test_a_simulated_engine_takes_no_gpu() -> None:
    assert not engine_kind("Simulated").on_gpus()
    assert engine_kind("Simulated").missing() is None


def test_weights_to_start_with_are_what_may_change_later() -> None:
    generation = Generation.model_validate({"model": {"source": "m"}})
    weights = Weights(uri="s3://b/w", version="7")
    args = ServeArgs.of(generation, weights=weights_source(weights), drain_seconds=33)
    assert read_args(json.loads(json.dumps(msgspec.to_builtins(args)))) == args
    options = deployment_options(args, gpus=1)
    assert options["user_config"] == {"weights": {"uri": "s3://b/w", "version": "7"}}
    assert options["graceful_shutdown_timeout_s"] == 33
    # Serve tells a replica nothing before it is ready where there is nothing to tell.
    assert deployment_options(app(), gpus=1)["user_config"] is not None


def test_replicas_that_follow_the_load() -> None:
    args = app(autoscaling={"minReplicas": 0, "maxReplicas": 5, "targetOngoingRequests": 32, "upscaleDelaySeconds": 4})
    options = deployment_options(args, gpus=1)
    assert "num_replicas" not in options
    assert options["autoscaling_config"] == {
        # None would leave nobody to ask, as workers talk to the replicas themselves.
        "min_replicas": 1,
        "max_replicas": 5,
        "target_ongoing_requests": 32,
        "upscale_delay_s": 4,
        "downscale_delay_s": 120,
        "look_back_period_s": 4,
    }
    assert (max_replicas(args), max_replicas(app(replicas=3))) == (5, 3)


def test_a_replica_over_several_pods() -> None:
    bundles = [{"CPU": 2.0, "GPU": 1.0}, *([{"CPU": 1.0, "GPU": 1.0}] * 7)]
    args = dataclasses.replace(app(engineArgs={"tensor_parallel_size": 8}), bundles=bundles)
    assert replica_gpus(args, on_gpus=True) == 8
    options = deployment_options(args, gpus=8)
    assert options["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 0}
    assert (options["placement_group_bundles"], options["placement_group_strategy"]) == (bundles, "PACK")
    assert placed_engine_args(args)["distributed_executor_backend"] == "ray"
    # Where there are no GPUs nothing is placed by them.
    assert "placement_group_bundles" not in deployment_options(args, gpus=0)


def test_replicas_that_share_a_gpu_share_its_memory() -> None:
    assert placed_engine_args(app(gpusPerReplica=0.5))["gpu_memory_utilization"] == 0.45
    set_by_user = app(gpusPerReplica=0.5, engineArgs={"gpu_memory_utilization": 0.3})
    assert placed_engine_args(set_by_user)["gpu_memory_utilization"] == 0.3
    assert "gpu_memory_utilization" not in placed_engine_args(app(gpusPerReplica=2))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"autoscaling": {"min_replicas": 0, "max_replicas": 4, "target_ongoing_requests": 8.0}},
        {"bundles": [{"CPU": 2.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}]},
    ],
)
def test_serve_takes_the_options(change: dict[str, Any]) -> None:
    args = dataclasses.replace(app(), **change)
    from ray import serve

    assert serve.deployment(**deployment_options(args, gpus=2))(object).name == "Generation"
    assert build(msgspec.to_builtins(args)) is not None


def test_several_devices_are_worked_by_child_processes() -> None:
    given = {"tensor_parallel_size": 2}
    for cpu in (True, False):
        arguments = engine_arguments(given, model="m", tokenizer="t", revision=None, cpu=cpu)
        assert arguments["distributed_executor_backend"] == "mp"
    arguments = engine_arguments(
        {**given, "distributed_executor_backend": "ray"}, model="m", tokenizer="t", revision=None, cpu=False
    )
    assert arguments["distributed_executor_backend"] == "ray"


def test_what_the_user_sets_wins() -> None:
    arguments = engine_arguments({"block_size": 64}, model="m", tokenizer="t", revision=None, cpu=True)
    assert (arguments["block_size"], arguments["enforce_eager"]) == (64, True)
    assert "enforce_eager" not in engine_arguments({}, model="m", tokenizer="t", revision=None, cpu=False)


def test_misspelled_engine_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"engineArgs\.max_model_length: .* did you mean max_model_len\?"):
        check_argument_names({"max_model_length": 1}, {"max_model_len", "dtype"})


def test_two_runs_share_neither_ports_nor_files(tmp_path: Path) -> None:
    first = serve_environment("Session", tmp_path / "a", free_ports(3), haproxy=True)
    second = serve_environment("LeastLoaded", tmp_path / "b", free_ports(3), haproxy=True)
    for name in first:
        if name.endswith(("_PORT", "_LOC", "_PATH", "_BASE", "_FILE")):
            assert first[name] != second[name], name
    assert first["RAY_SERVE_HAPROXY_BALANCE_ALGORITHM"] == "hdr(x-session-id)"
    assert second["RAY_SERVE_HAPROXY_BALANCE_ALGORITHM"] == "leastconn"


def test_chosen_ports_are_not_those_that_the_kernel_gives_to_connections() -> None:
    # A port of that range was lost to one of Ray's processes, or to anybody's connection, while Ray started.
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        given = listener.getsockname()[1]
    ports = free_ports(50)
    assert len(set(ports)) == 50
    assert max(ports) < 30_000 <= given


def test_a_port_in_use_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    used, unused = free_ports(2)
    monkeypatch.setattr(ray_settings, "_PORTS", (used, unused))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", used))
        assert free_ports(1) == [unused]
        with pytest.raises(OSError, match="fewer than 2 ports"):
            free_ports(2)


def test_without_haproxy_serve_s_own_proxy_is_used(tmp_path: Path) -> None:
    assert "RAY_SERVE_ENABLE_HA_PROXY" not in serve_environment("Session", tmp_path, free_ports(3), haproxy=False)


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (HAPROXY_OPEN_FILES, None),
        (resource.RLIM_INFINITY, None),
        (1024, "processes may open 1,024 files, and HAProxy needs 10,276; raise the hard limit"),
    ],
)
def test_haproxy_is_left_out_where_it_would_not_start(
    limit: int, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (min(limit, 1024), limit))
    reason = haproxy_problem()
    assert (reason is None) == (words is None)
    assert (words or "") in (reason or "")


def test_ray_keeps_to_loopback_unless_other_machines_are_to_join_it() -> None:
    alone, group = ray_environment(), ray_environment("of-the-group")
    # Ray refuses machines that want to join one which has this.
    assert alone.pop("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") == "0"
    assert group == {**alone, "RAY_AUTH_TOKEN": "of-the-group"}
    assert alone["RAY_AUTH_TOKEN"] != ray_environment()["RAY_AUTH_TOKEN"]


CHAIN_LOG = """\
ERROR 2026-01-01 10:00:00,000 controller 1 -- Exception in Replica(id='x'), the replica will be stopped.
Traceback (most recent call last):
  File "deployment_state.py", line 1, in check_ready
    await ready
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}

The above exception was the direct cause of the following exception:

ray::ServeReplica:kuberoll:Generation.initialize() (pid=1, ip=127.0.0.1)
  File "app.py", line 2, in __init__
    await self._engine.start()
RuntimeError: the engine's process EngineCore was killed by signal 4 (SIGILL)
"""

LOST_ACTOR_LOG = """\
ERROR 2026-01-01 10:00:00,000 controller 1 -- Exception in Replica(id='x'), the replica will be stopped.
Traceback (most recent call last):
  File "deployment_state.py", line 1, in check_ready
    await ready
ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
\tclass_name: ServeReplica:kuberoll:Generation
\tactor_id: 3737491d863aebfc0dc62dfe01000000
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was killed
"""

CRASH_LOG = """\
:job_id:01000000
:actor_name:ServeReplica:kuberoll:Generation
*** SIGSEGV received at time=1795325748 on cpu 1 ***
PC: @     0x7f7e2bb26f36  (unknown)  epoll_wait
"""

PEER_LOG = """\
(VllmWorker TP1) Traceback (most recent call last):
  File "parallel.py", line 1, in all_reduce
    group.all_reduce()
RuntimeError: [../third_party/gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:5
Traceback (most recent call last):
  File "multiproc_executor.py", line 2, in wait_for_ready
    raise e
Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause.
"""


def test_a_death_is_found_where_no_exception_tells_of_it() -> None:
    words = "the engine's process EngineCore was killed by signal 4 (SIGILL)"
    assert root_cause([CHAIN_LOG]) == words
    assert root_cause(["no traceback", f"RuntimeError: {words}\nnext line\n"]) == words


def test_a_death_that_was_seen_is_the_cause_where_exceptions_follow_from_it() -> None:
    killed = {"VllmWorker-0": -signal.SIGKILL, "EngineCore": -signal.SIGSEGV}
    for log in (PEER_LOG, LOST_ACTOR_LOG, "nothing"):
        assert (root_cause([log], killed) or "").startswith(
            "the engine's process VllmWorker-0 was killed by signal 9 (SIGKILL); most often by the kernel"
        )
    # Those that still live are killed when there is an exception.
    assert root_cause([ENGINE_LOG], killed) == "ValueError: No available memory for the cache blocks."


def test_a_dead_actor_is_explained_where_nobody_saw_it_die() -> None:
    assert (root_cause([LOST_ACTOR_LOG]) or "").startswith(
        "the process of ServeReplica:kuberoll:Generation ended without a message, as by SIGKILL; most often"
    )
    assert root_cause([LOST_ACTOR_LOG, CRASH_LOG]) == (
        "the engine's process ServeReplica:kuberoll:Generation was killed by signal 11 (SIGSEGV)"
    )
    assert (root_cause([LOST_ACTOR_LOG], {"IDLE": -signal.SIGKILL}) or "").startswith(
        "the engine's process ServeReplica:kuberoll:Generation was killed by signal 9 (SIGKILL); most often"
    )
    assert "process IDLE was killed" in (root_cause(["nothing"], {"IDLE": -signal.SIGKILL}) or "")
    unknown = CRASH_LOG.replace("SIGSEGV", "SIGNONE")
    assert "ended without a message" in (root_cause([LOST_ACTOR_LOG, unknown]) or "")
