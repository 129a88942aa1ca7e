"""The init container of an engine's pod that has its model in the cache before the engine starts.

    python -m kuberoll_workers.pods.models --model org/name --revision main --result FILE

FILE becomes a `contract.CachedModels`. The container has the operator's image, and of a job's variables only
`contract.MODEL_VARIABLES`: engines of other jobs load what it writes. It ends with 78 if the model does not exist, may
not be read or is larger than the cache, and with 1 if another try may succeed.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

import msgspec

from kuberoll_api.contract import (
    EXIT_FAILED,
    EXIT_REFUSED,
    GIVEN_PREFIX,
    MODEL_CACHE_DIRECTORY,
    MODEL_VARIABLES,
    CachedModel,
    CachedModels,
)
from kuberoll_api.logs import log_to_stderr
from kuberoll_workers.data.model_cache.bucket import BucketModel, in_bucket
from kuberoll_workers.data.model_cache.hub import HubModel
from kuberoll_workers.data.model_cache.source import ModelRefused, ModelUnavailable, Source
from kuberoll_workers.data.model_cache.store import MANIFEST, Store
from kuberoll_workers.pods.files import clip, write_termination_message

_log = logging.getLogger(__name__)


def take_given(environment: MutableMapping[str, str]) -> None:
    """Take the variables that came with a prefix, and that the cache uses; those without one take precedence."""
    for name in [name for name in environment if name.startswith(GIVEN_PREFIX)]:
        value = environment.pop(name)
        if (own := name.removeprefix(GIVEN_PREFIX)) in MODEL_VARIABLES:
            environment.setdefault(own, value)


def source_of(name: str, revision: str | None, *, part: str, every: bool = False) -> Source:
    """The origin of a model: an object store, or the hub."""
    if in_bucket(name):
        return BucketModel(name, part=part, every=every)
    return HubModel(name, revision, part=part, every=every)


def cache(given: argparse.Namespace) -> CachedModels:
    """Have all models in the cache.

    Raises:
        ModelRefused, ModelUnavailable: One cannot be.
    """
    store = Store(given.directory, node=given.node, limit=given.size, digests=given.digests)
    wanted = []
    if given.model:
        wanted.append((source_of(given.model, given.revision, part="model", every=given.every), False))
    if given.tokenizer:
        # The revision is the model's.
        wanted.append((source_of(given.tokenizer, None, part="tokenizer"), True))
    models = []
    for source, tokenizer in wanted:
        report = store.obtain(source)
        if not report.fetched:
            _log.info("%s: the cache has it", source.name)
        shown = Path(given.shown_at) / report.path.relative_to(given.directory)
        models.append(
            CachedModel(
                source=given.tokenizer if tokenizer else given.model,
                path=str(shown),
                # The files are in models/KEY/IDENTITY/KIND/NAME.
                held=str(shown.parent.parent / MANIFEST),
                tokenizer=tokenizer,
            )
        )
    return CachedModels(models=models)


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="kuberoll_workers.pods.models", description=__doc__)
    parser.add_argument("--model", help="hub id, or s3:// or gs:// URI; none: only a tokenizer")
    parser.add_argument("--revision", help="branch, tag or commit of a hub model")
    parser.add_argument("--every", action="store_true", help="fetch weights in every format")
    parser.add_argument("--tokenizer", help="hub id or URI of a tokenizer that is not with the model")
    parser.add_argument("--directory", type=Path, default=Path(MODEL_CACHE_DIRECTORY), help="the cache")
    parser.add_argument("--shown-at", help="where engines see that directory", default=MODEL_CACHE_DIRECTORY)
    parser.add_argument("--size", type=int, help="bytes that all models may have")
    parser.add_argument("--digests", action="store_true", help="read models that are there for their digests")
    parser.add_argument("--node", default=os.uname().nodename, help="name of this machine")
    parser.add_argument("--job", help="name of the job, for the log")
    parser.add_argument("--result", type=Path, required=True, help="file to write")
    given = parser.parse_args()
    log_to_stderr(**({} if given.job is None else {"job": given.job}))
    # The hub's client logs each request, under the name of its library.
    for name in ("httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    take_given(os.environ)
    # Progress is logged.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # What is fetched is kept here, and not once more beside it.
    os.environ.setdefault("HF_XET_CHUNK_CACHE_SIZE_BYTES", "0")
    try:
        result = cache(given)
    except (ModelRefused, ModelUnavailable) as error:
        _log.error("%s", error)
        write_termination_message(clip(str(error)).encode())
        sys.exit(EXIT_REFUSED if isinstance(error, ModelRefused) else EXIT_FAILED)
    except Exception as error:
        _log.exception("the model cannot be cached")
        write_termination_message(clip(f"{type(error).__name__}: {error}").encode())
        sys.exit(EXIT_FAILED)
    given.result.write_bytes(msgspec.json.encode(result))


if __name__ == "__main__":
    main()
