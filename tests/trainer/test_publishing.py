"""Publishing: what replicas serve, what is stored, and what remains when one of the two fails in the middle."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest

from kuberoll.trainer import (
    Deltas,
    EndpointError,
    LocationError,
    PolicyEndpoint,
    Publisher,
    PublishFailed,
    PublishSuperseded,
    Rollouts,
)
from kuberoll.trainer.locations import DirectoryLocation
from kuberoll.trainer.transports import Files
from kuberoll_workers.data.weights.manifest import CHANGES_FILE, MANIFEST_FILE, MODEL_FILE, directory_name
from kuberoll_workers.data.weights.tensors import read_directory
from kuberoll_workers.output.policy_file import POLICY_FILE, PolicyFile
from kuberoll_workers.serving.engines.fetching import fetch
from tests.output.s3 import S3Server, s3, s3_server
from tests.trainer.policies import Policy
from tests.trainer.support import WrittenRun

__all__ = ["s3", "s3_server"]

TRANSPORTS = ["files", "deltas"]


def weights(step: int, size: int = 4000) -> dict[str, Any]:
    """Weights of which a step changes a few."""
    values = numpy.random.default_rng(0).standard_normal((2, size)).astype(numpy.float16)
    for number in range(step):
        values[0, 7 * number : 7 * number + 5] += numpy.float16(0.01 * (number + 1))
    return {"a.weight": values[0].reshape(2, -1), "b.weight": values[1]}


def bits(step: int, size: int = 4000) -> dict[str, list[int]]:
    return {name: value.reshape(-1).view(numpy.uint16).tolist() for name, value in weights(step, size).items()}


@pytest.fixture
def policy(tmp_path: Path) -> Iterator[Policy]:
    with Policy(tmp_path / "replicas").serving("one", "two") as serving:
        yield serving


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "weights"


def publisher(policy: Policy, place: Path | str, **options: Any) -> Publisher:
    return Publisher(endpoint=policy.endpoint, location=place, **{"timeout": 60, "patience": 0.3, **options})


def served(policy: Policy) -> list[str]:
    return [replica.served for replica in policy.replicas.values()]


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir() if not path.name.startswith(".publisher"))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_replica_serves_exactly_what_was_published(policy: Policy, place: Path, transport: Any) -> None:
    one = publisher(policy, place, transport=transport)
    for step in range(1, 6):
        done = one.publish(weights(step), version=step)
        assert (done.version, done.uri, done.replicas) == (step, str(place / directory_name(step)), ("one", "two"))
        assert done.seconds.keys() == {"write", "store", "serve"}
        assert served(policy) == [str(step)] * 2
        for replica in policy.replicas.values():
            assert replica.engine.values == bits(step)
        if transport == "deltas" and step > 1:
            assert done.bytes < 1000
    # One that starts late has the newest before its first request.
    late = policy.add("late")
    assert (late.served, late.engine.values) == ("5", bits(5))


def test_deltas_come_in_an_object_store_too(policy: Policy, s3: tuple[S3Server, str]) -> None:
    server, bucket = s3
    one = publisher(policy, f"{bucket}/weights", transport=Deltas(anchor_every=3), keep=2)
    for step in range(1, 6):
        one.publish(weights(step), version=step)
        assert policy.replicas["one"].engine.values == bits(step)
    assert one.newest == 5
    # The description comes last, after what makes the version.
    assert server.puts[-1].endswith(f"{directory_name(5)}/{MANIFEST_FILE}")
    assert policy.add("late").engine.values == bits(5)
    with pytest.raises(ValueError, match="from 6"):
        one.publish(weights(5), version=5)
    # The fourth is whole, so what was before is not needed.
    one.publish(weights(6), version=6)
    assert one._location.versions() == [4, 5, 6]
    server.refused = (MANIFEST_FILE,)
    with pytest.raises(OSError, match="SlowDown"):
        one.publish(weights(7), version=7)
    server.refused = ()
    # Without its description it is no version, and nobody was told of it.
    assert (one.newest, policy.endpoint.weights().wanted) == (6, "6")
    one.publish(weights(8), version=8)
    assert policy.replicas["two"].engine.values == bits(8)


def test_a_directory_is_published_as_it_is(policy: Policy, place: Path, tmp_path: Path) -> None:
    first = publisher(policy, tmp_path / "other").publish(weights(3), version=1)
    publisher(policy, place).publish(first.uri, version=2)
    assert policy.replicas["one"].engine.values == bits(3)


@pytest.mark.parametrize("form", [Path, "{}/".format, "file://{}".format], ids=["path", "slash", "uri"])
def test_a_run_s_weights_are_beside_it_however_its_place_is_written(
    policy: Policy, tmp_path: Path, form: Callable[[Path], Any]
) -> None:
    run = WrittenRun(tmp_path / "run", groups=1)
    (tmp_path / "tokens.json").write_text(json.dumps({"weights": policy.endpoint.token}))
    given = PolicyFile(url=policy.url, tokens=str(tmp_path / "tokens.json"))
    (run.path / POLICY_FILE).write_bytes(msgspec.json.encode(given))
    published = Rollouts.open(form(run.path)).publish(weights(1))
    assert published.uri == str(tmp_path / "run-weights" / directory_name(1))
    assert served(policy) == ["1", "1"]


def test_versions_only_grow_and_are_never_overwritten(policy: Policy, place: Path) -> None:
    one = publisher(policy, place)
    one.publish(weights(1), version=3)
    before = (place / directory_name(3) / MODEL_FILE).read_bytes()
    for version in (3, 2, 0, -1, True, "4"):
        with pytest.raises(ValueError, match="whole number from 4"):
            one.publish(weights(2), version=version)  # type: ignore[arg-type]
    assert one.publish(weights(2), version=numpy.int64(4)).version == 4  # type: ignore[arg-type]
    # As a publisher that knows nothing of the policy would.
    location = DirectoryLocation(place)
    with location.writing(), location.workspace(3) as made:
        (made / "x").write_bytes(b"")
        with pytest.raises(LocationError, match="never overwritten"):
            location.commit(3, made)
    assert (place / directory_name(3) / MODEL_FILE).read_bytes() == before
    assert names(place) == [directory_name(3), directory_name(4)]


@pytest.mark.parametrize(("transport", "kept"), [(Files(), [4, 5, 6]), (Deltas(anchor_every=4), [1, 2, 3, 4, 5, 6])])
def test_old_versions_go_and_what_others_build_on_stays(policy: Policy, place: Path, transport: Any, kept: Any) -> None:
    one = publisher(policy, place, transport=transport)
    for step in range(1, 7):
        one.publish(weights(step), version=step)
    assert names(place) == [directory_name(version) for version in kept]
    for step in range(7, 10):
        one.publish(weights(step), version=step)
    # The fifth is whole: nothing builds on what was before.
    assert names(place)[0] == directory_name(7 if isinstance(transport, Files) else 5)


def test_old_versions_go_without_waiting_too(policy: Policy, place: Path) -> None:
    one = publisher(policy, place)
    for step in range(1, 8):
        one.publish(weights(step), version=step, wait=False)
        if step == 3:
            # As long as it is served it stays.
            one.wait(3)
    one.wait(7)
    assert names(place) == [directory_name(version) for version in (5, 6, 7)]
    assert policy.replicas["two"].engine.values == bits(7)


def test_what_a_replica_serves_is_kept(policy: Policy, place: Path) -> None:
    one = publisher(policy, place, keep=2)
    one.publish(weights(1), version=1)
    policy.replicas["two"].engine.refuses = {str(version) for version in range(2, 9)}
    for step in range(2, 5):
        with pytest.raises(PublishFailed):
            one.publish(weights(step), version=step)
    policy.remove("two")
    one.publish(weights(5), version=5)
    policy.add("three")
    one.publish(weights(6), version=6)
    assert names(place) == [directory_name(version) for version in (5, 6)]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_replica_that_cannot_have_it_leaves_the_old_version_everywhere(
    policy: Policy, place: Path, transport: Any
) -> None:
    one = publisher(policy, place, transport=transport)
    policy.replicas["two"].engine.refuses = {"1"}
    with pytest.raises(PublishFailed, match="The old version 0 is served everywhere"):
        one.publish(weights(1), version=1)
    one.publish(weights(2), version=2)
    policy.replicas["two"].engine.refuses = {"3"}
    with pytest.raises(PublishFailed) as failed:
        one.publish(weights(3), version=3)
    assert str(failed.value) == (
        "version 3 is not served: this replica does not like them. The old version 2 is served everywhere"
    )
    assert (failed.value.version, failed.value.served_version) == (3, "2")
    assert served(policy) == ["2", "2"]
    assert policy.replicas["one"].engine.values == bits(2)
    # The next one is published as if nothing had been.
    one.publish(weights(4), version=4)
    assert [replica.engine.values for replica in policy.replicas.values()] == [bits(4)] * 2


def test_weights_that_break_an_engine_are_withdrawn_by_its_replica(policy: Policy, place: Path) -> None:
    one = publisher(policy, place)
    one.publish(weights(1), version=1)
    for replica in policy.replicas.values():
        replica.engine.breaks_on = {"2"}
    done: list[BaseException] = []

    def publish() -> None:
        try:
            one.publish(weights(2), version=2)
        except PublishFailed as error:
            done.append(error)

    thread = threading.Thread(target=publish)
    thread.start()
    while not any(replica.live.problem for replica in policy.replicas.values()):
        assert thread.is_alive()
    # The replicas that Serve starts in their place have the old version, and not the one that breaks them.
    for name in ("one", "two"):
        policy.remove(name)
        policy.add(f"{name} again").engine.breaks_on = {"2"}
    thread.join(timeout=240)
    assert served(policy) == ["1", "1"]
    (error,) = done
    assert isinstance(error, PublishFailed)
    assert (
        "the policy wants version 1 again: a replica that it broke withdrew it (the log of its engine says why)"
        in str(error)
    )
    assert error.served_version == "1"


def test_a_replica_that_dies_in_loading_is_replaced_by_one_with_the_new_version(policy: Policy, place: Path) -> None:
    one = publisher(policy, place)
    one.publish(weights(1), version=1)
    policy.remove("two")
    one.publish(weights(2), version=2, wait=False)
    policy.add("three")
    assert one.wait(2).replicas == {"one": "2", "three": "2"}


def test_a_second_publisher_supersedes_or_is_refused(policy: Policy, place: Path, tmp_path: Path) -> None:
    one, other = publisher(policy, place), publisher(policy, tmp_path / "other")
    one.publish(weights(1), version=1, wait=False)
    other.publish(weights(2), version=2)
    with pytest.raises(PublishSuperseded, match="version 2 was published meanwhile"):
        one.wait(1)
    with DirectoryLocation(place).writing(), pytest.raises(LocationError, match="another process is publishing"):
        one.publish(weights(3), version=3)
    assert served(policy) == ["2", "2"]


def test_torn_files_are_refused_and_what_a_killed_publisher_left_is_removed(policy: Policy, place: Path) -> None:
    one = publisher(policy, place)
    one.publish(weights(1), version=1)
    (place / f".{directory_name(2)}.part").mkdir()
    (place / f".{directory_name(2)}.part" / MODEL_FILE).write_bytes(b"half")
    assert one.newest == 1
    one.publish(weights(2), version=2)
    assert names(place) == [directory_name(1), directory_name(2)]
    file = place / directory_name(1) / MODEL_FILE
    file.write_bytes(file.read_bytes()[:-1])
    policy.endpoint.serve(str(file.parent), "7")
    while "one" not in (found := policy.endpoint.weights()).problems:
        pass
    assert "was it written completely" in found.problems["one"]
    assert served(policy) == ["2", "2"]


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)


@pytest.mark.parametrize("what", ["lost base", "damaged copy", "damaged changes", "missing link"])
def test_changes_that_cannot_be_applied_are_replaced_by_an_anchor(policy: Policy, place: Path, what: str) -> None:
    one = publisher(policy, place, transport="deltas", patience=30)
    for step in range(1, 4):
        one.publish(weights(step), version=step)
    two = policy.replicas["two"].engine
    if what == "lost base":
        # A new machine: it goes back to the anchor.
        two.scratch = place.parent / "another"
    elif what == "damaged copy":
        damage(two.fetched[-1] / MODEL_FILE)
    elif what == "damaged changes":
        two.scratch = place.parent / "another"
        damage(place / directory_name(2) / CHANGES_FILE)
    else:
        two.scratch = place.parent / "another"
        (place / directory_name(2) / MANIFEST_FILE).unlink()
    one.publish(weights(4), version=4)
    assert [replica.engine.values for replica in policy.replicas.values()] == [bits(4)] * 2
    whole = (place / directory_name(4) / MODEL_FILE).exists()
    assert whole == (what in ("damaged changes", "missing link"))
    one.publish(weights(5), version=5)
    assert [replica.engine.values for replica in policy.replicas.values()] == [bits(5)] * 2


def test_a_copy_that_was_damaged_since_is_made_anew(policy: Policy, place: Path) -> None:
    one = publisher(policy, place, transport="deltas")
    for step in range(1, 4):
        one.publish(weights(step), version=step)
    two = policy.replicas["two"].engine
    damage(two.fetched[-1] / MODEL_FILE)
    again = fetch(one._location.uri(3), "3", two.scratch)
    assert again == two.fetched[-1]
    assert {name: tensor.bits.tolist() for name, tensor in read_directory(again).items()} == bits(3)


def test_a_damaged_anchor_is_refused(policy: Policy, place: Path) -> None:
    one = publisher(policy, place, transport="deltas")
    one.publish(weights(1), version=1)
    one.publish(weights(2), version=2)
    damage(place / directory_name(1) / MODEL_FILE)
    two = policy.replicas["two"].engine
    two.scratch = place.parent / "another"
    policy.endpoint.serve(str(place / directory_name(1)), "again")
    while "two" not in (found := policy.endpoint.weights()).problems:
        pass
    assert "damaged" in found.problems["two"]


def test_a_restarted_trainer_begins_with_an_anchor(policy: Policy, place: Path) -> None:
    publisher(policy, place, transport="deltas").publish(weights(1), version=1)
    again = publisher(policy, place, transport="deltas")
    assert again.newest == 1
    assert (place / directory_name(1) / MODEL_FILE).exists()
    again.publish(weights(2), version=2)
    assert not (place / directory_name(2) / CHANGES_FILE).exists()
    # Another model is one, too.
    again.publish({"other": numpy.zeros(3, numpy.float32)}, version=3)
    assert policy.replicas["one"].engine.values == {"other": [0, 0, 0]}


def test_a_policy_that_does_not_answer_or_refuses_says_so(policy: Policy, place: Path) -> None:
    for endpoint, words in [
        (PolicyEndpoint("http://127.0.0.1:1"), "127.0.0.1:1/v1/weights"),
        (PolicyEndpoint("ftp://x"), "begins with http"),
        (PolicyEndpoint(policy.url, "another"), "answered 403: no; give a token of the scope `weights`"),
    ]:
        with pytest.raises(EndpointError, match=words):
            Publisher(endpoint=endpoint, location=place).publish(weights(1), version=1)
    assert not place.exists()


def test_arguments_are_checked(policy: Policy, place: Path) -> None:
    wrong: list[dict[str, Any]] = [{"keep": 1}, {"transport": "pigeons"}, {"dtype": "int8"}]
    for given in wrong:
        with pytest.raises(ValueError, match=next(iter(given))):
            publisher(policy, place, **given).publish(weights(1), version=1)
    with pytest.raises(ValueError, match="anchor_every"):
        Deltas(anchor_every=0)
