"""A run's trajectories as batches for a trainer, and the trainer's weights for the run's policy.

Batches are whole prompt groups, each exactly once, as they finish; weights are published as versions.

docs/how-to/training.md is the guide.
"""

try:
    from kuberoll.trainer.advantages import dr_grpo, grpo, rloo
    from kuberoll.trainer.batch import Batch, InexactTrajectory, RowTooLong
    from kuberoll.trainer.broadcast import Broadcast
    from kuberoll.trainer.endpoint import EndpointError, PolicyEndpoint, ServedWeights, run_endpoint
    from kuberoll.trainer.groups import Group, GroupKey
    from kuberoll.trainer.locations import LocationError
    from kuberoll.trainer.model_weights import full_state
    from kuberoll.trainer.pace_control import PacedByAnother
    from kuberoll.trainer.publishing import Publication, Publisher, PublishFailed, PublishSuperseded
    from kuberoll.trainer.rollouts import Counts, Rollouts
    from kuberoll.trainer.state import StateRefused
    from kuberoll.trainer.transports import Adapters, Deltas, Files
    from kuberoll.trainer.workers import Workers, run_workers
    from kuberoll_workers.data.weights.tensors import UnusableWeights
    from kuberoll_workers.output.run_files import NotARun
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"kuberoll.trainer needs {error.name}, which is not installed: pip install 'kuberoll[trainer]'", name=error.name
    ) from error

__all__ = [
    "Adapters",
    "Batch",
    "Broadcast",
    "Counts",
    "Deltas",
    "EndpointError",
    "Files",
    "Group",
    "GroupKey",
    "InexactTrajectory",
    "LocationError",
    "NotARun",
    "PacedByAnother",
    "PolicyEndpoint",
    "Publication",
    "PublishFailed",
    "PublishSuperseded",
    "Publisher",
    "Rollouts",
    "RowTooLong",
    "ServedWeights",
    "StateRefused",
    "UnusableWeights",
    "Workers",
    "dr_grpo",
    "full_state",
    "grpo",
    "rloo",
    "run_endpoint",
    "run_workers",
]
