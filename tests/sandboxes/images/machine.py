"""A machine's view of an image: its layers as an overlay, in namespaces of its own.

python -m tests.sandboxes.images.machine REQUEST

prints a JSON object. It is a program of its own, so that an ordinary user can run it, and because what enters a user
namespace has one thread.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kuberoll_workers.sandboxes.images.overlay import overlay_options
from kuberoll_workers.sandboxes.images.store import ImageStore
from kuberoll_workers.sandboxes.users import IdMap, id_map
from tests.sandboxes.images.trees import tree_of
from tests.sandboxes.namespaces import inside, mount


def mounted(ids: IdMap, layers: list[Path], scratch: Path, work: Callable[[str], Any]) -> Any:
    """Do something with layers mounted on each other, as a machine has them; with the path where they are."""
    scratch.mkdir(parents=True, exist_ok=True)
    places = [scratch / name for name in ("upper", "work", "root")]
    for path in places:
        path.mkdir(exist_ok=True)
        os.chown(path, ids.outside(0), ids.outside_group(0))
        path.chmod(0o755)
    how = overlay_options(layers, places[0], places[1])

    def body() -> Any:
        os.chdir(how.directory)
        mount("overlay", str(places[2]), 0, "overlay", how.options)
        return work(str(places[2]))

    return inside(ids, body)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """What the program does: unpack an image, and look at it as a machine does."""
    ids = id_map()
    store = ImageStore(Path(request["store"]), ids)
    image = store.image(request["reference"])
    removed = 0
    tree = mounted(ids, list(image.layers), Path(request["scratch"]), tree_of)
    if request.get("remove"):
        removed = ImageStore(Path(request["store"]), ids, grace=0).remove_unused()
    return {
        "ids": ids.text(),
        "why": ids.single_because,
        "count": ids.count,
        "image": {**dataclasses.asdict(image), "layers": [str(path) for path in image.layers]},
        "tree": tree,
        "removed": removed,
    }


if __name__ == "__main__":
    json.dump(answer(json.loads(sys.argv[1])), sys.stdout)
