from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any, get_args

import pytest

from kuberoll_api import plugins
from kuberoll_api.environment_types import (
    AGENT_TYPE,
    GYM_AGENT_TYPE,
    SANDBOX_AGENT_TYPE,
    BuiltInEnvironment,
    LibraryEnvironment,
)
from kuberoll_api.model.environments import Environment
from kuberoll_workers.environments import (
    BUILT_INS,
    LIBRARIES,
    EnvironmentInterface,
    UnusableEnvironment,
    create,
    resolve,
)
from tests.environments.support import CONFIGS


@dataclass
class Spec:
    name: str = "mine"
    type: str | None = None
    entrypoint: str | None = None
    config: dict[str, Any] = field(default_factory=dict)


class DuckEnvironment:
    """Has the two methods and no base class."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        config["mine"] = True

    def step(self, message_log_batch: Any, metadata: Any) -> Any: ...

    def global_post_process_and_metrics(self, batch: Any) -> Any: ...

    class Inner:
        step = global_post_process_and_metrics = print


class BrokenEnvironment(DuckEnvironment):
    def __init__(self, config: dict[str, Any]) -> None:
        raise KeyError("model_path")


def test_manifests_may_name_the_built_ins_and_no_others() -> None:
    assert set(get_args(BuiltInEnvironment)) == set(BUILT_INS)
    assert set(get_args(LibraryEnvironment)) == set(LIBRARIES)
    own = {AGENT_TYPE, GYM_AGENT_TYPE, SANDBOX_AGENT_TYPE}
    assert {*BUILT_INS, *LIBRARIES, *own} == set(plugins.installed(plugins.ENVIRONMENTS))


@pytest.mark.parametrize("name", ["sliding_puzzle", "nemo_gym", AGENT_TYPE])
def test_a_type_that_no_installed_package_has_says_what_to_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a checkout that was not installed again after a change."""
    monkeypatch.setattr(plugins, "find", lambda group, name: None)
    with pytest.raises(
        UnusableEnvironment, match=rf"no installed package registers '{name}' .* install KubeRoll again"
    ):
        create(Spec(type=name))


@pytest.mark.parametrize("name", sorted(BUILT_INS))
def test_built_ins_are_made_from_the_api_model(name: str) -> None:
    spec = Environment.model_validate({"name": "a_name", "type": name, "config": CONFIGS.get(name, {})})
    environment = create(spec)
    assert isinstance(environment, EnvironmentInterface)
    assert type(environment) is resolve(type=name)


def test_an_unknown_type_lists_the_built_ins() -> None:
    with pytest.raises(UnusableEnvironment, match=r"'sliding_puzle' \(did you mean 'sliding_puzzle'\?\)") as caught:
        create(Spec(type="sliding_puzle"))
    assert all(name in str(caught.value) for name in [*BUILT_INS, *LIBRARIES, "'mine'", "entrypoint"])


@pytest.mark.parametrize(
    ("entrypoint", "said"),
    [
        ("no_such_package.module:Class", "there is no module 'no_such_package'; install it"),
        ("json.no_such_module:Class", "there is no module 'json.no_such_module'"),
        (f"{__name__}:DuckEnvironmen", "did you mean 'DuckEnvironment'"),
        (f"{__name__}:Spec", "missing: step, global_post_process_and_metrics"),
        ("json", "not of the form package.module:Class"),
        ("json:", "not of the form package.module:Class"),
    ],
)
def test_a_bad_entrypoint_says_what_is_wrong(entrypoint: str, said: str) -> None:
    with pytest.raises(UnusableEnvironment) as caught:
        resolve(entrypoint=entrypoint)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_dependency", "it needs the module 'no_such_dependency', which is not installed"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("class A(", "SyntaxError"),
    ],
)
def test_a_module_that_fails_to_import(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, source: str, said: str) -> None:
    name = f"failing_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnusableEnvironment) as caught:
        resolve(entrypoint=f"{name}:A")
    assert said in str(caught.value)


def test_a_duck_typed_class_gets_its_own_copy_of_the_config() -> None:
    spec = Spec(entrypoint=f"{__name__}:DuckEnvironment", config={"key": 1})
    environment: Any = create(spec)
    assert environment.config == {"key": 1, "mine": True}
    assert spec.config == {"key": 1}
    inner: Any = DuckEnvironment.Inner
    assert resolve(entrypoint=f"{__name__}:DuckEnvironment.Inner") is inner


def test_a_constructor_that_raises_is_named() -> None:
    with pytest.raises(UnusableEnvironment, match="environment 'mine': its constructor raised KeyError: 'model_path'"):
        create(Spec(entrypoint=f"{__name__}:BrokenEnvironment"))


def test_a_recovery_that_does_not_exist_is_named() -> None:
    words = "environment 'mine': UnknownRecovery.recovery is 'later'; it must be one of 'metadata', 'replay', 'restart'"
    with pytest.raises(UnusableEnvironment, match=f"^{words}$"):
        create(Spec(entrypoint="tests.authoring.broken:UnknownRecovery"))


@pytest.mark.parametrize("given", [{}, {"type": "math", "entrypoint": "a:B"}])
def test_exactly_one_of_type_and_entrypoint(given: dict[str, str]) -> None:
    with pytest.raises(UnusableEnvironment, match="exactly one"):
        resolve(**given)


@pytest.mark.parametrize(
    ("type_", "config", "said"),
    [
        ("sliding_puzzle", {"sise": 2}, "config.sise: unknown; did you mean size? allowed are size, rows"),
        ("sliding_puzzle", {"size": "2"}, "config.size: found '2'"),
        ("sliding_puzzle", {"shuffle_moves": 3}, "did you mean shuffleMoves?"),
        ("sliding_puzzle", {"rows": 2}, "rows and cols belong together"),
        ("sliding_puzzle", {"rows": 2, "cols": 2, "size": 2}, "size excludes rows and cols"),
        ("calculator", {"operators": ["+", "%"]}, "config.operators.1: found '%'"),
        ("calculator", {"steps": 0, "maxCalls": 0}, "config.maxCalls: found 0"),
        ("calculator", {"minOperand": 9, "maxOperand": 8}, "minOperand 9 is above maxOperand 8"),
        ("calculator", {"steps": 16}, "beyond 10^15"),
        ("calculator", {"operators": ["/"], "minOperand": 0, "maxOperand": 0}, "other than 0"),
        ("math", {"maxNumber": 1}, "config.maxNumber: found 1"),
    ],
)
def test_a_wrong_config_names_the_field(type_: str, config: dict[str, Any], said: str) -> None:
    with pytest.raises(UnusableEnvironment) as caught:
        create(Spec(name="one", type=type_, config=config))
    assert said in str(caught.value)
    assert str(caught.value).startswith("environment 'one': config")


def test_importing_the_package_is_cheap() -> None:
    heavy = ["torch", "ray", "vllm", "transformers", "math_verify", "sympy", "numpy", *LIBRARIES]
    script = (
        "import sys, kuberoll_workers.environments as e\n"
        "for name in [*e.BUILT_INS, *e.LIBRARIES]: e.resolve(type=name)\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_an_environment_may_say_what_its_episodes_keep() -> None:
    class Typed(EnvironmentInterface[dict[str, int]]):
        def step(self, message_log_batch: Any, metadata: Any) -> Any:
            return None

        def global_post_process_and_metrics(self, batch: Any) -> Any:
            return batch, {}

    assert isinstance(Typed(), EnvironmentInterface)


def test_an_environment_prints_what_the_output_has_no_code_for() -> None:
    program = (
        "from kuberoll_workers.environments.registry import PlainSpec, create\n"
        "create(PlainSpec(name='env', type=None, entrypoint='tests.environments.misbehaving:Misbehaving', config={}))\n"
        "print('\\u2705')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii:strict", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.endswith(b"\\u2705\n"), done.stderr.decode()


class Choosy:
    """An agent that refuses a config."""

    @classmethod
    def check(cls, config: dict[str, Any]) -> None:
        if "level" not in config:
            raise UnusableEnvironment("config.level: missing")

    async def run(self, episode: Any) -> float:
        return 1.0


def test_an_agent_may_refuse_its_config_before_an_engine_is_started() -> None:
    spec = {"name": "agents", "agent": {"entrypoint": f"{__name__}:Choosy"}, "config": {"level": 3}}
    create(Environment.model_validate(spec))
    with pytest.raises(UnusableEnvironment, match=r"environment 'agents': config\.level: missing"):
        create(Environment.model_validate({**spec, "config": {}}))
