"""GPUs of replicas and pods: what fits is placed whole, what does not is refused with the arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from kuberoll_api.model.generation import Generation
from kuberoll_operator.placement import GPU, Placement, PlacementError, gpus_of, place
from tests.operator.support import job


def generation(pod_gpus: Any, tensor: int = 1, pipeline: int = 1, **more: Any) -> Generation:
    arguments = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    resources = {"limits": {GPU: pod_gpus}} if pod_gpus is not None else {}
    return job(generation={"engineArgs": arguments, "resources": resources, **more}).spec.generation


@pytest.mark.parametrize(
    ("given_", "expected", "pods_for_three"),
    [
        (generation("1"), Placement(gpus=1, pod_gpus=1), 3),
        (generation(4, 4), Placement(gpus=4, pod_gpus=4), 3),
        (generation("8", 4), Placement(gpus=4, pod_gpus=8, per_pod=2), 2),
        (generation("8", 8, 2), Placement(gpus=16, pod_gpus=8, pods_per_replica=2), 6),
        (generation("1", gpusPerReplica=0.5), Placement(gpus=0.5, pod_gpus=1, per_pod=2), 2),
        # Ray gives a replica no parts of two GPUs.
        (generation("2", gpusPerReplica=0.4), Placement(gpus=0.4, pod_gpus=2, per_pod=4), 1),
        (generation("4", gpusPerReplica=2), Placement(gpus=2, pod_gpus=4, per_pod=2), 2),
        (generation(None, 2), Placement(gpus=0, pod_gpus=0), 3),
        (generation("1", engine="Simulated"), Placement(gpus=0, pod_gpus=1), 3),
        # A dry run of what would span pods.
        (
            generation("1", engine="Simulated", gpusPerReplica=2),
            Placement(gpus=2, pod_gpus=1, pods_per_replica=2),
            6,
        ),
        (generation(None, engine="Simulated", gpusPerReplica=2), Placement(gpus=0, pod_gpus=0), 3),
    ],
)
def test_placements(given_: Generation, expected: Placement, pods_for_three: int) -> None:
    found = place(given_, one_per_pod=False)
    assert found == expected
    assert found.pods(3) == pods_for_three


def test_a_pod_of_one_replica_may_be_a_part_of_it() -> None:
    assert place(generation("8", 8, 2), one_per_pod=True, may_span=True).pods_per_replica == 2
    with pytest.raises(PlacementError, match="or install LeaderWorkerSet"):
        place(generation("8", 8, 2), one_per_pod=True)
    for shared in (generation("4"), generation("1", gpusPerReplica=0.5)):
        with pytest.raises(PlacementError, match="every pod is one replica"):
            place(shared, one_per_pod=True, may_span=True)


@pytest.mark.parametrize(
    ("given_", "one_per_pod", "words"),
    [
        (generation("6", 8, 2), False, "tensor_parallel_size 8 x pipeline_parallel_size 2 = 16 GPUs a replica; pods"),
        (generation("6", 8, 2), False, "pods have 6, which is neither a multiple nor a divisor"),
        (generation("6", 8, 2), False, "to one of 1, 2, 4, 8, 16, or a multiple of 16"),
        (generation("4"), True, "= 1 GPU a replica; pods have 4"),
        (generation("4"), True, "tensor_parallel_size x pipeline_parallel_size"),
        (generation("1", gpusPerReplica=0.5), True, "use backend KubeRay"),
        (generation("2", gpusPerReplica=1.5), False, "whole number"),
        (generation("8", 4, gpusPerReplica=2), False, "gpusPerReplica: 2 is less than tensor_parallel_size 4"),
        (generation(None, gpusPerReplica=2), False, "gpusPerReplica: 2; pods have 0"),
        (generation("500m"), False, "whole GPUs"),
        (generation("1", 0), False, "engineArgs.tensor_parallel_size: found 0"),
    ],
)
def test_refusals_show_the_arithmetic(given_: Generation, one_per_pod: bool, words: str) -> None:
    with pytest.raises(PlacementError) as refused:
        place(given_, one_per_pod=one_per_pod)
    assert words in str(refused.value)
    assert str(refused.value).startswith("spec.generation.")


def test_the_pod_template_prevails_here_as_in_the_pod() -> None:
    template = {"spec": {"containers": [{"name": "generation", "resources": {"limits": {GPU: "4"}}}]}}
    assert place(generation("1", 4, podTemplate=template), one_per_pod=True).pod_gpus == 4


@given(st.integers(1, 64), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 3, 4]), st.integers(1, 40))
@example(8, 8, 2, 3)
def test_every_replica_has_its_gpus_and_no_pod_gives_more_than_it_has(
    pod_gpus: int, tensor: int, pipeline: int, replicas: int
) -> None:
    world = tensor * pipeline
    if pod_gpus % world and world % pod_gpus:
        with pytest.raises(PlacementError):
            place(generation(pod_gpus, tensor, pipeline), one_per_pod=False)
        return
    found = place(generation(pod_gpus, tensor, pipeline), one_per_pod=False)
    pods = found.pods(replicas)
    assert pods * pod_gpus >= replicas * world
    assert found.replicas(pods) >= replicas
    # One pod less would be too few.
    assert found.replicas(pods - 1) < replicas
    assert found.per_pod * world <= max(pod_gpus, world)
    assert found.pods_per_replica * pod_gpus >= world
    bundles = found.bundles()
    if bundles is not None:
        assert sum(bundle["GPU"] for bundle in bundles) == world
        assert all(bundle["GPU"] == 1 for bundle in bundles)
        assert [bundle.get("CPU", 0) for bundle in bundles] == [1, *[0] * (world - 1)]


@given(st.floats(0.001, 0.999), st.integers(1, 16), st.integers(1, 200))
def test_shares_of_a_gpu_never_come_to_more_than_one(part: float, pod_gpus: int, replicas: int) -> None:
    assume(round(part * 10_000) >= 1)
    found = place(generation(pod_gpus, gpusPerReplica=part), one_per_pod=False)
    assert found.per_pod // pod_gpus * round(part * 10_000) <= 10_000
    assert found.replicas(found.pods(replicas)) >= replicas


@pytest.mark.parametrize(
    ("generation", "gpus"),
    [
        ({}, 0),
        ({"resources": {"limits": {"nvidia.com/gpu": "0"}}}, 0),
        ({"resources": {"limits": {"nvidia.com/gpu": "1"}}}, 1),
        ({"resources": {"limits": {"nvidia.com/gpu": 8}}, "engineArgs": {"tensor_parallel_size": 8}}, 8),
        (
            {
                "resources": {"limits": {"nvidia.com/gpu": "8"}},
                "engineArgs": {"tensor_parallel_size": 8, "pipeline_parallel_size": 2},
            },
            16,
        ),
        ({"resources": {"limits": {"nvidia.com/gpu": "1"}}, "gpusPerReplica": 0.25}, 0.25),
        ({"resources": {"limits": {"nvidia.com/gpu": "1"}}, "engineArgs": {"tensor_parallel_size": "two"}}, 1),
    ],
)
def test_gpus_of_a_replica_as_they_are_counted(generation: dict[str, Any], gpus: float) -> None:
    assert gpus_of(generation) == gpus
