"""Types and reasons of a RolloutJob's conditions: an interface between the operator and whatever watches jobs."""

from __future__ import annotations

from typing import Final

SUSPENDED: Final = "Suspended"
WORKERS_CHECKED: Final = "WorkersChecked"
GENERATION_READY: Final = "GenerationReady"
WORKERS_READY: Final = "WorkersReady"
WEIGHTS_SERVED: Final = "WeightsServed"
HELD_BACK: Final = "HeldBack"
STARVED: Final = "Starved"
SUCCESS_CRITERIA_MET: Final = "SuccessCriteriaMet"
FAILURE_TARGET: Final = "FailureTarget"
COMPLETE: Final = "Complete"
FAILED: Final = "Failed"

CONDITION_TYPES: Final = (
    SUSPENDED,
    WORKERS_CHECKED,
    GENERATION_READY,
    WORKERS_READY,
    WEIGHTS_SERVED,
    HELD_BACK,
    STARVED,
    SUCCESS_CRITERIA_MET,
    FAILURE_TARGET,
    COMPLETE,
    FAILED,
)


class Reason:
    """Reasons, grouped by condition. docs/reference/reasons.md explains each."""

    # Suspended
    SUSPENDING: Final = "Suspending"
    JOB_SUSPENDED: Final = "JobSuspended"
    JOB_RESUMED: Final = "JobResumed"
    QUEUED: Final = "Queued"
    EVICTED: Final = "Evicted"
    ADMITTED: Final = "Admitted"
    # WorkersChecked
    CHECKING: Final = "Checking"
    CHECKED: Final = "Checked"
    # GenerationReady
    WAITING_FOR_CHECK: Final = "WaitingForCheck"
    STARTING: Final = "Starting"
    UNSCHEDULABLE: Final = "Unschedulable"
    IMAGE_PULL: Final = "ImagePullError"
    ENGINE_FAILED: Final = "EngineFailed"
    CONTAINER_FAILED: Final = "ContainerFailed"
    CRASHING: Final = "Crashing"
    POD_CONFIG: Final = "PodConfigError"
    VOLUME: Final = "VolumeNotReady"
    POD_SANDBOX: Final = "PodSandboxError"
    POD_REMOVED: Final = "PodRemoved"
    SANDBOX: Final = "SandboxNotReady"
    NODE_LOST: Final = "NodeLost"
    NOT_ANSWERING: Final = "NotAnswering"
    READY: Final = "Ready"
    EXTERNAL: Final = "External"
    RELEASED: Final = "Released"
    WAITING_FOR_TURN: Final = "WaitingForTurn"
    # WorkersReady
    WAITING_FOR_GENERATION: Final = "WaitingForGeneration"
    RUNNING: Final = "Running"
    SHARDS_DONE: Final = "ShardsDone"
    # WeightsServed
    WEIGHTS_LOADING: Final = "WeightsLoading"
    WEIGHTS_CURRENT: Final = "WeightsCurrent"
    # HeldBack
    WAITING_FOR_TRAINER: Final = "WaitingForTrainer"
    # Starved
    WAITING_FOR_ROLLOUTS: Final = "WaitingForRollouts"
    # HeldBack, Starved
    IN_STEP: Final = "InStep"
    # SuccessCriteriaMet, Complete
    TRAJECTORIES_DONE: Final = "TrajectoriesDone"
    # FailureTarget, Failed
    INVALID_SPEC: Final = "InvalidSpec"
    INVALID_TEMPLATE: Final = "InvalidTemplate"
    STARTUP_DEADLINE: Final = "StartupDeadlineExceeded"
    ACTIVE_DEADLINE: Final = "DeadlineExceeded"
    FAILED_SHARDS: Final = "FailedShards"
    REFUSED: Final = "Refused"
    CHECK_FAILED: Final = "CheckFailed"
    FAILURE_BUDGET: Final = "FailureBudgetExceeded"
    FINISH_FAILED: Final = "FinishFailed"
    # On any condition whose objects cannot be written
    FORBIDDEN: Final = "Forbidden"
    FIELD_CONFLICT: Final = "FieldConflict"
    NAME_TAKEN: Final = "NameTaken"
    QUOTA: Final = "QuotaExceeded"
