"""Weights from the trainer's memory to all replicas at once, and what is served when one of them fails."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from kuberoll.trainer import Broadcast, Publisher, PublishFailed, senders
from kuberoll_workers.data.weights.manifest import MODEL_FILE, directory_name
from kuberoll_workers.data.weights.offers import offer_of
from tests.trainer.gated_sender import Gate
from tests.trainer.policies import Policy
from tests.trainer.receivers import ReceivingEngine


def weights(step: int) -> dict[str, torch.Tensor]:
    """Tensors of several types and shapes, other ones at each step."""
    draw = torch.Generator().manual_seed(step)
    return {
        "a.weight": torch.randn(17, 9, generator=draw).bfloat16().T,
        "b.weight": torch.randn(100_000, generator=draw),
        "c.weight": torch.randint(-128, 127, (3,), generator=draw, dtype=torch.int8),
        "d.scale": torch.tensor(step, dtype=torch.float64),
        "e.weight": torch.randn(8, 2, generator=draw).to(torch.float8_e4m3fn),
        "f.empty": torch.empty(0, 4),
    }


def bits(step: int) -> dict[str, list[int]]:
    return {name: tensor.contiguous().reshape(-1).view(torch.uint8).tolist() for name, tensor in weights(step).items()}


@pytest.fixture
def policy(tmp_path: Path) -> Iterator[Policy]:
    with Policy(tmp_path / "replicas", ReceivingEngine).serving("one", "two") as serving:
        yield serving


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "weights"


@pytest.fixture
def publishers(policy: Policy, place: Path) -> Iterator[Any]:
    made: list[Publisher] = []

    def make(transport: Any = "broadcast", **options: Any) -> Publisher:
        settings = {"timeout": 60, "patience": 1.0, **options}
        made.append(Publisher(endpoint=policy.endpoint, location=place, transport=transport, **settings))
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()


def engine(policy: Policy, name: str) -> ReceivingEngine:
    found = policy.replicas[name].engine
    assert isinstance(found, ReceivingEngine)
    return found


def served(policy: Policy) -> list[str]:
    return [replica.served for replica in policy.replicas.values()]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Stops what is sent as version 2 in the middle."""
    made = Gate(2)
    monkeypatch.setitem(senders.SENDERS, "gloo", made.sender)
    return made


def publishing(publisher: Publisher, step: int) -> tuple[threading.Thread, list[Any]]:
    """Publish in a thread; what came of it is in the list at its end."""
    results: list[Any] = []

    def publish() -> None:
        try:
            results.append(publisher.publish(weights(step), version=step))
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=publish)
    thread.start()
    return thread, results


def test_every_replica_has_exactly_what_was_published(policy: Policy, place: Path, publishers: Any) -> None:
    one = publishers()
    for step in range(1, 5):
        done = one.publish(weights(step), version=step)
        assert done.replicas == ("one", "two")
        assert done.bytes == sum(tensor.nbytes for tensor in weights(step).values())
        assert served(policy) == [str(step)] * 2
        for name in ("one", "two"):
            assert engine(policy, name).values == bits(step)
    # One group for all, without files.
    joined = [engine(policy, name).workers.joined for name in ("one", "two")]
    assert sorted(joined) == [[(1, 3)], [(2, 3)]]
    assert not list(place.rglob(MODEL_FILE))
    # One that starts late has the newest before its first request.
    policy.add("late")
    assert (policy.replicas["late"].served, engine(policy, "late").values) == ("4", bits(4))
    # The next is for all three.
    one.publish(weights(5), version=5)
    assert sorted(engine(policy, name).workers.joined[-1] for name in policy.replicas) == [(1, 4), (2, 4), (3, 4)]
    policy.remove("one")
    one.publish(weights(6), version=6)
    assert [engine(policy, name).values for name in policy.replicas] == [bits(6)] * 2
    assert one.newest == 6


def test_all_workers_of_a_replica_receive(tmp_path: Path, place: Path) -> None:
    counts = iter((2, 3))
    with Policy(tmp_path / "replicas", lambda scratch: ReceivingEngine(scratch, next(counts))).serving("a", "b") as two:
        with Publisher(endpoint=two.endpoint, location=place, transport="broadcast") as publisher:
            publisher.publish(weights(1), version=1)
        assert [engine(two, name).values for name in "ab"] == [bits(1)] * 2
        joined = sorted(engine(two, name).workers.joined[0] for name in "ab")
        assert joined in ([(1, 6), (3, 6)], [(1, 6), (4, 6)])


def test_models_arrays_and_types_are_those_of_other_transports(policy: Policy, publishers: Any) -> None:
    one = publishers(dtype="bfloat16")
    one.publish({"a": torch.ones(5, 3), "b": torch.arange(3)}, version=1)
    assert len(engine(policy, "one").values["a"]) == 30
    publishers().publish({"x": numpy.ones(3, numpy.float16)}, version=2)
    assert engine(policy, "two").values == {"x": [0, 60] * 3}


@pytest.mark.slow
def test_a_replica_that_cannot_have_them_leaves_the_old_version_everywhere(policy: Policy, publishers: Any) -> None:
    one = publishers()
    one.publish(weights(1), version=1)
    engine(policy, "two").refuses = {"2"}
    with pytest.raises(PublishFailed, match="this replica does not like them") as failed:
        one.publish(weights(2), version=2)
    assert failed.value.served_version == "1"
    # The other one was not bothered.
    assert [engine(policy, name).values for name in ("one", "two")] == [bits(1)] * 2
    assert engine(policy, "one").pauses == 1
    # What was taken back is still there for one that starts late.
    policy.add("late")
    assert engine(policy, "late").values == bits(1)
    one.publish(weights(3), version=3)
    assert [engine(policy, name).values for name in policy.replicas] == [bits(3)] * 3


def test_a_replica_that_breaks_withdraws_them_and_the_others_return(policy: Policy, publishers: Any) -> None:
    one = publishers()
    one.publish(weights(1), version=1)
    engine(policy, "two").breaks_on = {"2"}
    thread, results = publishing(one, 2)
    # Before it is replaced, it takes the version back.
    while policy.wanted != "1" or policy.replicas["two"].live.problem is None:
        assert thread.is_alive() or policy.wanted == "1"
    policy.remove("two")
    policy.add("two again")
    thread.join(60)
    assert isinstance(results[0], PublishFailed)
    assert served(policy) == ["1", "1"]
    assert [engine(policy, name).values for name in policy.replicas] == [bits(1)] * 2


@pytest.mark.slow
def test_a_replica_that_dies_in_the_middle_costs_the_others_a_second_try(
    policy: Policy, publishers: Any, gate: Gate
) -> None:
    one = publishers(Broadcast(gather_seconds=0.5, chunk_bytes=1000), patience=30)
    one.publish(weights(1), version=1)
    thread, results = publishing(one, 2)
    assert gate.reached.wait(60)
    policy.remove("two")
    gate.opened.set()
    thread.join(60)
    assert results[0].replicas == ("one",)
    assert engine(policy, "one").values == bits(2)
    # It was paused once for each version that it has.
    assert (engine(policy, "one").pauses, engine(policy, "one").workers.aborted) == (2, 1)


@pytest.mark.slow
def test_a_trainer_that_ends_in_the_middle_leaves_the_old_version_everywhere(
    policy: Policy, publishers: Any, gate: Gate
) -> None:
    transport = Broadcast(chunk_bytes=1000)
    one = publishers(transport, timeout=2)
    one.publish(weights(1), version=1)
    thread, results = publishing(one, 2)
    assert gate.reached.wait(60)
    server = transport._server
    assert server is not None
    # As the end of its process does.
    server._leave_group()
    thread.join(60)
    gate.opened.set()
    assert isinstance(results[0], PublishFailed)
    assert served(policy) == ["1", "1"]
    assert [engine(policy, name).values for name in policy.replicas] == [bits(1)] * 2
    assert [engine(policy, name).pauses for name in policy.replicas] == [1, 1]


@pytest.mark.slow
def test_a_publication_after_a_trainer_that_died_in_the_middle_may_fail_too(
    policy: Policy, publishers: Any, gate: Gate
) -> None:
    test_a_trainer_that_ends_in_the_middle_leaves_the_old_version_everywhere(policy, publishers, gate)
    # As it is if the trainer's process is gone: nobody takes the version back.
    policy.endpoint.serve("trainer://127.0.0.1:1/2?key=x", "2")
    while len(policy.endpoint.weights().problems) < 2:
        pass
    engine(policy, "two").refuses = {"3"}
    again = publishers()
    with pytest.raises(PublishFailed, match="The old version 1 is served everywhere"):
        again.publish(weights(3), version=3)
    again.publish(weights(4), version=4)
    assert [engine(policy, name).values for name in policy.replicas] == [bits(4)] * 2


@pytest.mark.slow
def test_a_transfer_that_hangs_is_given_up(policy: Policy, publishers: Any, gate: Gate) -> None:
    one = publishers(Broadcast(chunk_bytes=1000, seconds=1.0), timeout=20)
    one.publish(weights(1), version=1)
    thread, results = publishing(one, 2)
    assert gate.reached.wait(60)
    while len(policy.endpoint.weights().problems) < 2:
        assert thread.is_alive()
    gate.opened.set()
    thread.join(60)
    # They have come again.
    assert results[0].replicas == ("one", "two")
    assert [engine(policy, name).values for name in policy.replicas] == [bits(2)] * 2


@pytest.mark.slow
def test_replicas_that_receive_in_place_are_replaced_if_the_trainer_is_lost(
    tmp_path: Path, place: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(senders.SENDERS, "nccl", gate.sender)
    transport = Broadcast("nccl", chunk_bytes=1000, files=True)
    names = ("one", "two")
    with Policy(tmp_path / "replicas", lambda scratch: ReceivingEngine(scratch, backend="nccl")).serving(*names) as two:
        one = Publisher(endpoint=two.endpoint, location=place, transport=transport, timeout=60, patience=1)
        one.publish(weights(1), version=1)
        thread, results = publishing(one, 2)
        assert gate.reached.wait(60)
        assert [engine(two, name).pauses for name in names] == [2, 2]
        server = transport._server
        assert server is not None
        server._leave_group()
        while not all(replica.live.problem for replica in two.replicas.values()):
            assert thread.is_alive()
        gate.opened.set()
        for name in names:
            two.remove(name)
            two.add(f"{name} again")
        thread.join(60)
        assert isinstance(results[0], PublishFailed)
        assert results[0].served_version == "1"
        one.close()
        # Without the trainer, by its files.
        assert two.add("late").served == "1"


def test_a_replica_that_cannot_receive_reads_files(policy: Policy, place: Path, publishers: Any) -> None:
    engine(policy, "two").receives = False
    one = publishers(Broadcast(gather_seconds=0.2), patience=30)
    for step in (1, 2):
        assert one.publish(weights(step), version=step).replicas == ("one", "two")
        assert (place / directory_name(step) / MODEL_FILE).exists()
    assert engine(policy, "one").pauses == 2
    assert len(engine(policy, "two").values["b.weight"]) == 100_000


def test_files_are_there_for_replicas_that_start_while_the_trainer_is_away(
    policy: Policy, place: Path, publishers: Any
) -> None:
    one = publishers(Broadcast(files=True))
    assert "files" in one.publish(weights(1), version=1).seconds
    one.close()
    policy.add("late")
    assert policy.replicas["late"].served == "1"
    # A trainer that comes back publishes the next one to all.
    again = publishers()
    assert again.next_version() == 2
    again.publish(weights(2), version=2)
    assert [engine(policy, name).values for name in policy.replicas] == [bits(2)] * 3


def test_versions_that_come_faster_than_replicas_take_them(policy: Policy, publishers: Any) -> None:
    one = publishers()
    for step in range(1, 8):
        one.publish(weights(step), version=step, wait=False)
    assert one.wait(7).everywhere == "7"
    assert [engine(policy, name).values for name in policy.replicas] == [bits(7)] * 2


def test_strangers_have_nothing(policy: Policy, publishers: Any) -> None:
    one = publishers()
    one.publish(weights(1), version=1)
    wanted = policy._publications.newest()
    assert wanted is not None
    assert wanted.weights is not None
    offer = offer_of(wanted.weights.uri)
    assert offer is not None
    with socket.create_connection((offer.host, offer.port)) as stranger:
        # The length of its first message would be more than a gigabyte.
        stranger.sendall(b"GET ")
        assert stranger.recv(100) == b""
    policy.endpoint.serve(wanted.weights.uri.replace(offer.key, "gu%C3%A9ssed"), "7")
    while "one" not in (found := policy.endpoint.weights()).problems:
        pass
    assert "the key is wrong" in found.problems["one"]
    assert served(policy) == ["1", "1"]
    one.publish(weights(8), version=8)


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="backend: found 'pigeons'; use one of gloo, nccl"):
        Broadcast("pigeons")
