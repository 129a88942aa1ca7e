"""The confinement of programs in a worker's pod as the operator renders it and a kubelet starts it."""

from __future__ import annotations

import json

import pytest

from tests.containers.images import ROOT
from tests.containers.node import ContainerNode, pod_of
from tests.containers.test_pods import children, job
from tests.environments.attacks import LIMITED, REACHING, WITHOUT_EFFECT

_GRADE = """
import asyncio
from kuberoll_workers.environments.builtin.code.execution import CodeExecutionEnvironment
from kuberoll_workers.environments.builtin.code.tasks import solution_of
environment = CodeExecutionEnvironment({})
states = [row["metadata"] for row in environment.generate_dataset(3, 0)] * 2
programs = [solution_of(state["task"], state["number"]) for state in states[:3]]
programs += [solution_of(state["task"], state["number"] + 1) for state in states[3:]]
logs = [[{"role": "assistant", "content": f"```python\\n{program}```"}] for program in programs]
print(asyncio.run(environment.step(logs, states)).rewards)
environment.shutdown()
"""

pytestmark = pytest.mark.timeout(900, func_only=True)


@pytest.mark.parametrize("signals", ["scoped", pytest.param("supervised", marks=pytest.mark.long)])
async def test_attacks_on_the_confinement_fail_in_a_worker_s_pod(
    node: ContainerNode, worker_image: str, signals: str
) -> None:
    made = job(f"attacked-{signals}", {"backend": "Native"}, count=1, repeats=1)
    parts = await children(node, made)
    pod = pod_of(parts["Job/workers"], f"attacked-{signals}", index=0)
    [container] = pod["spec"]["containers"]
    # As restricted as the operator makes it.
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    container["command"] = ["sleep", "infinity"]
    container.pop("args", None)
    node.runtime.folders["/attacks/tests"] = ROOT / "tests"
    home = node.run(pod)
    await node.until(pod["metadata"]["name"], lambda item: home.is_running(container["name"]), 240)
    option = ["supervise-signals"] if signals == "supervised" else []
    command = ["env", "PYTHONPATH=/attacks", "python", "-m", "tests.environments.attack_here", *option]
    code, text = await home.execute(container["name"], command, 600)
    assert code == 0, text[-4000:]
    found = json.loads(text.splitlines()[-1])
    assert found["user"] == 65532
    assert found["faults"] == [], found
    assert found["outcomes"].keys() == {*REACHING, *WITHOUT_EFFECT, *LIMITED}
    code, text = await home.execute(container["name"], ["python", "-c", _GRADE], 240)
    assert (code, text.split()) == (0, ["[1.0,", "1.0,", "1.0,", "0.0,", "0.0,", "0.0]"]), text[-4000:]
