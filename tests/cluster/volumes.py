"""A pod's volumes as directories of this machine, and its paths, addresses and variables put in their place."""

from __future__ import annotations

import base64
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Object = dict[str, Any]
Find = Callable[[str, str], Awaitable[Object | None]]
"""Finds an object of the pod's namespace by kind and name."""

# They have a meaning of their own here, where jobs name files below them that are no volume's.
_NOT_SUBSTITUTED = ("/tmp", "/dev/shm")


class NotYet(Exception):
    """Something that the pod needs is not there; the kubelet tries again. The message is the container's."""


@dataclass(slots=True)
class PodFiles:
    """Directories of one pod.

    Attributes:
        root: What the pod alone has. Its path is short: sockets are made below it.
        claims: Directory of the namespace's claims, each one a directory that pods share.
        resolve: Replaces names of Services.
    """

    root: Path
    claims: Path
    resolve: Callable[[str], str]
    volumes: dict[str, Path] = field(default_factory=dict)
    _given: dict[Path, bytes] = field(default_factory=dict)
    _fresh: set[Path] = field(default_factory=set)

    async def make(self, pod: Object, find: Find) -> None:
        """Makes the volumes' directories, or has them show what has changed since; contents wait for `fill`.

        Raises:
            NotYet: A ConfigMap or Secret is not there.
        """
        for index, volume in enumerate(pod["spec"].get("volumes", ())):
            path = self.root / str(index)
            if claim := volume.get("persistentVolumeClaim"):
                path = self.claims / claim["claimName"]
            path.mkdir(parents=True, exist_ok=True)
            self.volumes[volume["name"]] = path
        for volume in pod["spec"].get("volumes", ()):
            for name, content in (await self._contents(volume, find)).items():
                file = self.volumes[volume["name"]] / name
                if self._given.get(file) == content:
                    continue
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
                self._given[file] = content
                self._fresh.add(file)
        self.show(pod)

    def show(self, pod: Object) -> None:
        """Has volumes of the downward API show the pod as it is now; each file changes as a whole."""
        for volume in pod["spec"].get("volumes", ()):
            for item in volume.get("downwardAPI", {}).get("items", ()):
                file = self.volumes[volume["name"]] / item["path"]
                fresh = file.with_name(f".{file.name}")
                fresh.write_text(downward(pod, item["fieldRef"]["fieldPath"]))
                fresh.rename(file)

    async def _contents(self, volume: Object, find: Find) -> dict[str, bytes]:
        sources = volume.get("projected", {}).get("sources", [volume])
        if any("serviceAccountToken" in source for source in sources):
            # Clients look for it at a path that processes of this machine have not.
            return {}
        found: dict[str, bytes] = {}
        for source in sources:
            for kind, key, named in (("ConfigMap", "configMap", "name"), ("Secret", "secret", "secretName")):
                if (given := source.get(key)) is None:
                    continue
                name = given.get(named) or given.get("name")
                item = await find(kind, name)
                if item is None:
                    if given.get("optional"):
                        continue
                    raise NotYet(f'MountVolume.SetUp failed for volume "{volume["name"]}": {kind} "{name}" not found')
                paths = {item["key"]: item["path"] for item in given.get("items", ())}
                for name, content in data_of(item).items():
                    if not paths or name in paths:
                        found[paths.get(name, name)] = content
        return found

    def mounts(self, container: Object) -> dict[str, Path]:
        """Directories by where the container sees them."""
        return {
            mount["mountPath"].rstrip("/"): self.volumes[mount["name"]] / mount.get("subPath", "")
            for mount in container.get("volumeMounts", ())
        }

    def translate(self, text: str, container: Object) -> str:
        """The text with the container's paths and the cluster's addresses as they are on this machine."""
        return self.resolve(substitute(text, self.mounts(container)))

    def fill(self, pod: Object, container: Object) -> None:
        """Translates the contents of the ConfigMaps that the container mounts, as far as they are new."""
        from_maps = {volume["name"] for volume in pod["spec"].get("volumes", ()) if "configMap" in volume}
        for mount in container.get("volumeMounts", ()):
            if mount["name"] in from_maps:
                for file in self.volumes[mount["name"]].rglob("*"):
                    if file in self._fresh:
                        file.write_text(self.translate(file.read_text(), container))

    def filled(self) -> None:
        """Note that all containers have had their contents."""
        self._fresh.clear()

    def temporary(self, container: Object) -> Path:
        """The container's /tmp."""
        path = self.mounts(container).get("/tmp") or self.root / f"t{container['name'][:3]}"
        path.mkdir(parents=True, exist_ok=True)
        return path


def data_of(item: Object) -> dict[str, bytes]:
    """Contents of a ConfigMap or Secret."""
    if item["kind"] == "Secret":
        return {name: base64.b64decode(value) for name, value in (item.get("data") or {}).items()}
    binary = {name: base64.b64decode(value) for name, value in (item.get("binaryData") or {}).items()}
    return binary | {name: value.encode() for name, value in (item.get("data") or {}).items()}


def substitute(text: str, mounts: Mapping[str, Path]) -> str:
    """Replaces mount paths, whole ones only, the longest first: `/etc/app` is not in `/etc/app-data`."""
    for path in sorted(mounts, key=len, reverse=True):
        if path not in _NOT_SUBSTITUTED:
            target = str(mounts[path]).replace("\\", r"\\")
            text = re.sub(rf"(?<![\w./-]){re.escape(path)}(?![\w.-])", target, text)
    return text


async def variables(pod: Object, container: Object, find: Find) -> dict[str, str]:
    """The container's environment, in Kubernetes' order: sources, then single variables with `$(NAME)` expanded.

    Raises:
        NotYet: A ConfigMap, Secret or key is not there.
    """
    values: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        for kind, key in (("ConfigMap", "configMapRef"), ("Secret", "secretRef")):
            if given := source.get(key):
                item = await find(kind, given["name"])
                if item is None and not given.get("optional"):
                    raise NotYet(f'{kind.lower()} "{given["name"]}" not found')
                for name, content in data_of(item or {"kind": kind}).items():
                    values[source.get("prefix", "") + name] = content.decode()
    for variable in container.get("env", ()):
        value = await _value(pod, variable, find)
        if value is not None:
            values[variable["name"]] = expand(value, values)
    return values


async def _value(pod: Object, variable: Object, find: Find) -> str | None:
    source = variable.get("valueFrom")
    if source is None:
        return str(variable.get("value", ""))
    if given := source.get("fieldRef"):
        return downward(pod, given["fieldPath"])
    for kind, key in (("ConfigMap", "configMapKeyRef"), ("Secret", "secretKeyRef")):
        if given := source.get(key):
            item = await find(kind, given["name"])
            content = data_of(item).get(given["key"]) if item else None
            if content is None and not given.get("optional"):
                missing = f"couldn't find key {given['key']} in {kind} {pod['metadata']['namespace']}/{given['name']}"
                raise NotYet(missing if item else f'{kind.lower()} "{given["name"]}" not found')
            return None if content is None else content.decode()
    raise NotYet(f"the test kubelet knows no {', '.join(source)} of variable {variable['name']}")


def downward(pod: Object, path: str) -> str:
    """A field of the pod as the downward API gives it: `status.podIP`, `metadata.labels['name']`."""
    if match := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
        return str(pod["metadata"].get(match[1], {}).get(match[2], ""))
    value: Any = pod
    for part in path.split("."):
        value = value.get(part, "")
    return str(value)


def expand(text: str, values: Mapping[str, str]) -> str:
    """`$(NAME)` replaced by the variable; unknown ones and `$$(NAME)` stay as they are written."""
    pattern = re.compile(r"\$(\$)?\(([-._a-zA-Z][-._a-zA-Z0-9]*)\)")
    return pattern.sub(lambda match: match[0][1:] if match[1] else values.get(match[2], match[0]), text)
