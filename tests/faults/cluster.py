"""A cluster of several nodes that has KubeRoll's chart, by kubectl; what to do to its nodes, its user says."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from kuberoll_operator.podtemplate import merge

Object = dict[str, Any]

VARIABLE = "KUBEROLL_FAULTS"
NEEDS = f"""\
These tests need a cluster of two nodes or more on which KubeRoll's chart is installed, and a YAML file that {VARIABLE}
names; all of its fields may be absent:

kubectl: kubectl --context faults        # with the rights of an administrator
kubeconfig: /home/me/.kube/config        # for `kuberoll get`
wrapper: ip netns exec faults            # what `kuberoll get` is run with
storageClass: efs                        # one with ReadWriteMany; absent: the default
volumes: volumes.yaml                    # instead of a class: what makes the claim NAME in NAMESPACE
image: kuberoll/worker:TAG               # of the jobs' engines and workers; absent: the chart's
break: ssh NODE sudo ip link set eth0 down   # takes a node off the network; absent: no node is lost
mend: ssh NODE sudo ip link set eth0 up
kill: power off NODE                     # without telling Kubernetes; absent: no node is killed
revive: power on NODE
stopKubelet: ssh NODE sudo systemctl stop kubelet
startKubelet: ssh NODE sudo systemctl start kubelet
fillDisk: ssh NODE sudo fallocate -l 900G /var/lib/kubelet/full
clearDisk: ssh NODE sudo rm /var/lib/kubelet/full
removeDns: kubectl -n kube-system scale deployment coredns --replicas 0
restoreDns: kubectl -n kube-system scale deployment coredns --replicas 2
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The cluster, and a namespace of the test's own.

    Attributes:
        started: When the test began, for what it prints.
    """

    options: Mapping[str, Any]
    namespace: str
    started: float = field(default_factory=time.monotonic)

    def kubectl(self, *arguments: str, given: str | None = None, check: bool = True) -> str:
        """The output of kubectl."""
        command = [*shlex.split(str(self.options.get("kubectl", "kubectl"))), *arguments]
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise RuntimeError(f"{shlex.join(command)}: {done.stderr}")
        return done.stdout

    def apply(self, *items: Object) -> None:
        """Apply objects."""
        given = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(items)})
        self.kubectl("apply", "--server-side", "-f", "-", given=given)

    def get(self, kind: str, name: str) -> Object:
        """An object of the namespace; empty if there is none."""
        found = self.kubectl("-n", self.namespace, "get", kind, name, "--ignore-not-found", "-o", "json")
        return dict(json.loads(found)) if found.strip() else {}

    def pods(self, job: str, component: str) -> list[Object]:
        """Pods of a job, by name."""
        selector = f"kuberoll.io/job={job},app.kubernetes.io/component={component}"
        found = json.loads(self.kubectl("-n", self.namespace, "get", "pods", "-l", selector, "-o", "json"))["items"]
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))

    def claim(self, name: str, mode: str = "ReadWriteMany") -> None:
        """Make a claim."""
        if (template := self.options.get("volumes")) is not None:
            text = Path(template).read_text().replace("NAMESPACE", self.namespace).replace("NAME", name)
            self.apply(*YAML(typ="safe").load_all(text.replace("ReadWriteMany", mode)))
            return
        spec = {"accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}}
        if (kind := self.options.get("storageClass")) is not None:
            spec["storageClassName"] = kind
        metadata = {"name": name, "namespace": self.namespace}
        self.apply({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec})

    def job(self, name: str, spec: Mapping[str, Any]) -> None:
        """Apply a job of light engines, whose pods leave a lost node after 10 seconds."""
        leave = [
            {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 10}
            for key in ("unreachable", "not-ready")
        ]
        apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"kuberoll.io/job": name}}}
        wish = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": apart}]}
        image = {"image": self.options["image"]} if "image" in self.options else {}
        pods = {"podTemplate": {"spec": {"affinity": {"podAntiAffinity": wish}, "tolerations": leave}}, **image}
        base: Object = {
            "generation": {
                "engine": "Simulated",
                "model": {"source": "/opt/kuberoll/models/tiny-policy"},
                "simulated": {"responses": ["<action>up</action>", "<action>left</action>"], "tokenSeconds": 0.05},
                "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
                **pods,
            },
            "environments": [{"name": "sliding_puzzle", "type": "sliding_puzzle", "config": {"size": 2}}],
            "dataset": {"source": {"generator": {"count": 400}}, "repeats": 4},
            "rollout": {"concurrency": 8},
            "workers": {"resources": {"requests": {"cpu": "100m", "memory": "128Mi"}}, **pods},
            "output": {"uri": f"pvc://{name}/run"},
        }
        self.apply({
            "apiVersion": "kuberoll.io/v1alpha1", "kind": "RolloutJob",
            "metadata": {"name": name, "namespace": self.namespace}, "spec": merge(base, spec),
        })  # fmt: skip

    def until(self, job: str, holds: Callable[[Object], bool], *, seconds: float = 900) -> Object:
        """The status of a job when something holds; what its conditions say is printed as it changes."""
        told: dict[str, tuple[str, ...]] = {}
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            status = self.get("rlj", job).get("status") or {}
            for item in status.get("conditions") or ():
                words = (str(item["status"]), str(item["reason"]), str(item.get("message", "")))
                if told.get(item["type"]) != words:
                    told[item["type"]] = words
                    self.note(f"{item['type']}={words[0]} {words[1]}: {words[2]}")
            if holds(status):
                return dict(status)
            time.sleep(1)
        raise AssertionError(f"{job} in {seconds:.0f} s: {json.dumps(told, indent=1)}")

    def note(self, text: str) -> None:
        """Print a line with the seconds since the test began."""
        sys.stderr.write(f"{time.monotonic() - self.started:6.1f} s  {text}\n")

    def change_node(self, what: str, node: str) -> None:
        """Break or mend a node as the options say."""
        command = str(self.options[what]).replace("NODE", node)
        self.note(command)
        subprocess.run(command, shell=True, check=True)


def options() -> Mapping[str, Any] | None:
    """The options of the cluster; None if there is none."""
    path = os.environ.get(VARIABLE)
    return None if not path else dict(YAML(typ="safe").load(Path(path).read_text()))


@contextmanager
def namespace(given: Mapping[str, Any]) -> Iterator[Cluster]:
    """A cluster with a new namespace, which goes at the end."""
    cluster = Cluster(options=given, namespace=f"faults-{uuid.uuid4().hex[:6]}")
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": cluster.namespace}})
    try:
        yield cluster
    finally:
        cluster.kubectl("delete", "namespace", cluster.namespace, "--wait=false")
