"""Every metric of the workers, as data."""

from __future__ import annotations

from typing import Final

from kuberoll_api.metrics import Counter, Gauge, Histogram, Label, MetricGroup, metrics_by_name

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_START_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_REWARDS = (-10.0, -5.0, -2.0, -1.0, -0.5, 0.0, 0.25, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0)
_TURNS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
_LAG_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)

_JOB: tuple[Label, ...] = ("rolloutjob",)
_ENVIRONMENT: tuple[Label, ...] = ("rolloutjob", "environment")
_TURN: tuple[Label, ...] = ("rolloutjob", "environment", "turn")

TRAJECTORIES_PLANNED: Final = Gauge(
    name="kuberoll_trajectories_planned",
    unit="trajectories",
    labels=_JOB,
    help="Planned trajectories of this worker's shards.",
)
TRAJECTORIES_STORED: Final = Gauge(
    name="kuberoll_trajectories_stored",
    unit="trajectories",
    labels=_JOB,
    help="Finished trajectories of this worker's shards that are durable, including those from before a restart.",
)
TRAJECTORIES_ABANDONED: Final = Gauge(
    name="kuberoll_trajectories_abandoned",
    unit="trajectories",
    labels=_JOB,
    help="Planned trajectories that will not be stored: failed permanently in this process, or in groups that were "
    "filtered out and not replaced.",
)
TRAJECTORIES_ACTIVE: Final = Gauge(
    name="kuberoll_trajectories_active",
    unit="trajectories",
    labels=(*_ENVIRONMENT, "state"),
    help="Trajectories in flight, by what they wait for: generation or environment.",
)
TRAJECTORIES: Final = Counter(
    name="kuberoll_trajectories_total",
    unit="trajectories",
    labels=(*_ENVIRONMENT, "stop_reason"),
    help="Trajectories ended, by stop reason; `failed` ones failed permanently.",
)
TRAJECTORY_SECONDS: Final = Histogram(
    name="kuberoll_trajectory_seconds",
    unit="seconds",
    labels=_ENVIRONMENT,
    help="Wall seconds of a finished trajectory.",
    buckets=_SECONDS,
)
TRAJECTORY_TURNS: Final = Histogram(
    name="kuberoll_trajectory_turns",
    unit="turns",
    labels=_ENVIRONMENT,
    help="Turns of a finished trajectory.",
    buckets=_TURNS,
)
RESUMED_TURNS: Final = Counter(
    name="kuberoll_resumed_turns_total",
    unit="turns",
    labels=_ENVIRONMENT,
    help="Turns of resumed trajectories from before the interruption.",
)
EPISODES: Final = Counter(
    name="kuberoll_episodes_total",
    unit="episodes",
    labels=_ENVIRONMENT,
    help="Episodes begun, of environments with `reset` or `close`.",
)
EPISODES_CLOSED: Final = Counter(
    name="kuberoll_episodes_closed_total",
    unit="episodes",
    labels=(*_ENVIRONMENT, "result"),
    help="Episodes closed at the end of their trajectory; `failed`: the environment's `close` failed.",
)
EPISODE_RECOVERIES: Final = Counter(
    name="kuberoll_episode_recoveries_total",
    unit="recoveries",
    labels=(*_ENVIRONMENT, "recovery"),
    help="Episodes whose state was lost, or unknown after a failure: replayed, or their trajectory restarted.",
)
AGENT_CALLS: Final = Counter(
    name="kuberoll_agent_calls_total",
    unit="calls",
    labels=(*_ENVIRONMENT, "continuity"),
    help="Answered calls of agents, by how their prompts continued what was sampled before in the session.",
)
DROPPED_TRAJECTORIES: Final = Counter(
    name="kuberoll_dropped_trajectories_total",
    unit="trajectories",
    labels=(*_ENVIRONMENT, "reason"),
    help="Trajectories that were dropped: oversampled ones, and those of groups that were filtered out or too old.",
)
DROPPED_TOKENS: Final = Counter(
    name="kuberoll_dropped_tokens_total",
    unit="tokens",
    labels=(*_ENVIRONMENT, "reason"),
    help="Tokens generated for dropped trajectories.",
)

TURNS: Final = Counter(name="kuberoll_turns_total", unit="turns", labels=_TURN, help="Turns finished.")
TURN_WAITING_SECONDS: Final = Histogram(
    name="kuberoll_turn_waiting_seconds",
    unit="seconds",
    labels=_TURN,
    help="Wall seconds of a turn outside generation and environment: waiting for its batch (Lockstep), for the "
    "journal or for the worker's CPU.",
    buckets=_SECONDS,
)
TURN_GENERATION_SECONDS: Final = Histogram(
    name="kuberoll_turn_generation_seconds",
    unit="seconds",
    labels=_TURN,
    help="Wall seconds that a turn waited for generation, including queueing and retries.",
    buckets=_SECONDS,
)
TURN_ENVIRONMENT_SECONDS: Final = Histogram(
    name="kuberoll_turn_environment_seconds",
    unit="seconds",
    labels=_TURN,
    help="Wall seconds that a turn waited for its environment step, including queueing and retries.",
    buckets=_SECONDS,
)
ENVIRONMENT_TIMEOUT_SECONDS: Final = Gauge(
    name="kuberoll_environment_timeout_seconds",
    unit="seconds",
    labels=_ENVIRONMENT,
    help="Time limit of a step of the environment, in seconds: stepTimeoutSeconds.",
    over_processes="max",
)
TOKENS: Final = Counter(
    name="kuberoll_tokens_total",
    unit="tokens",
    labels=(*_ENVIRONMENT, "kind"),
    help="Tokens by kind: prompt (sent, counted in every turn), cached (of those, reused by the engine), generated, "
    "environment.",
)

TRAJECTORY_REWARD: Final = Histogram(
    name="kuberoll_trajectory_reward",
    unit="reward",
    labels=_ENVIRONMENT,
    help="Total reward of a finished trajectory.",
    buckets=_REWARDS,
)
# A histogram with buckets below 0 has no sum, and a counter must not fall: hence the two signs.
REWARD: Final = Counter(
    name="kuberoll_reward_total",
    unit="reward",
    labels=(*_ENVIRONMENT, "sign"),
    help="Sum of the rewards of finished trajectories, positive and negative ones separately, as absolute values.",
)

FAILURES: Final = Counter(
    name="kuberoll_failures_total",
    unit="failures",
    labels=(*_ENVIRONMENT, "kind", "stage"),
    help="Trajectories that failed permanently, by the kind of fault and the stage.",
)
RETRIES: Final = Counter(
    name="kuberoll_retries_total",
    unit="retries",
    labels=(*_ENVIRONMENT, "stage"),
    help="Operations retried.",
)
INCIDENTS: Final = Counter(
    name="kuberoll_incidents_total",
    unit="incidents",
    labels=(*_ENVIRONMENT, "kind", "reason"),
    help="What went wrong with trajectories that went on, by whose doing it was and why.",
)
WASTED_SECONDS: Final = Counter(
    name="kuberoll_wasted_seconds_total",
    unit="seconds",
    labels=(*_ENVIRONMENT, "kind"),
    help="Time of trajectories that incidents and failures threw away.",
)
WASTED_TOKENS: Final = Counter(
    name="kuberoll_wasted_tokens_total",
    unit="tokens",
    labels=(*_ENVIRONMENT, "kind"),
    help="Generated tokens that incidents and failures threw away.",
)
PREFIX_VIOLATIONS: Final = Counter(
    name="kuberoll_prefix_violations_total",
    unit="violations",
    labels=_ENVIRONMENT,
    help="Trajectories that failed because their context was not what was sent and sampled: a bug in the policy.",
)

SANDBOXES_IN_USE: Final = Gauge(
    name="kuberoll_sandboxes_in_use",
    unit="sandboxes",
    labels=_ENVIRONMENT,
    help="Sandboxes that trajectories have now.",
)
SANDBOXES_WAITING: Final = Gauge(
    name="kuberoll_sandboxes_waiting",
    unit="sandboxes",
    labels=_ENVIRONMENT,
    help="Sandboxes that trajectories wait for: those that start, and those whose start is held back by others.",
)
SANDBOXES_AHEAD: Final = Gauge(
    name="kuberoll_sandboxes_ahead",
    unit="sandboxes",
    labels=_ENVIRONMENT,
    help="Sandboxes that are started, or starting, for trajectories that have not begun.",
)
SANDBOXES_PREPARED: Final = Counter(
    name="kuberoll_sandboxes_prepared_total",
    unit="sandboxes",
    labels=(*_ENVIRONMENT, "result"),
    help="Sandboxes that were started ahead of their trajectory by result: used, unused (removed without having been "
    "needed) or failed (not started, or lost before they were needed; their trajectory has another one).",
)
SANDBOX_WAIT_SECONDS: Final = Histogram(
    name="kuberoll_sandbox_wait_seconds",
    unit="seconds",
    labels=_ENVIRONMENT,
    help="Wall seconds for which a trajectory waited for its sandbox to be ready, its task's set-up included.",
    buckets=_START_SECONDS,
)
SANDBOX_STARTS: Final = Counter(
    name="kuberoll_sandbox_starts_total",
    unit="starts",
    labels=(*_ENVIRONMENT, "result"),
    help="Starts of sandboxes by result: started or failed. One that is cancelled with its trajectory is neither.",
)
SANDBOX_START_SECONDS: Final = Histogram(
    name="kuberoll_sandbox_start_seconds",
    unit="seconds",
    labels=_ENVIRONMENT,
    help="Wall seconds of a start that succeeded, the wait for other starts included.",
    buckets=_START_SECONDS,
)
SANDBOXES_LOST: Final = Counter(
    name="kuberoll_sandboxes_lost_total",
    unit="sandboxes",
    labels=_ENVIRONMENT,
    help="Sandboxes that were gone before their trajectory had ended, also while they started; it starts over in "
    "another one.",
)
GRADER_INPUTS_CHANGED: Final = Counter(
    name="kuberoll_grader_changed_steps_total",
    unit="steps",
    labels=_ENVIRONMENT,
    help="Steps of tasks whose agent changed what tests in its machine read without being told: programs on the path, "
    "startup files, configuration of pytest.",
)
SANDBOX_REMOVALS: Final = Counter(
    name="kuberoll_sandbox_removals_total",
    unit="removals",
    labels=(*_ENVIRONMENT, "result"),
    help="Removals of started sandboxes by result: removed or failed.",
)
SANDBOXES_LEFT: Final = Gauge(
    name="kuberoll_sandboxes_left",
    unit="sandboxes",
    labels=_ENVIRONMENT,
    help="Sandboxes whose removal failed, and whose lease has not ended yet; with it they end by themselves.",
)

JOURNAL_SYNC_SECONDS: Final = Histogram(
    name="kuberoll_journal_sync_seconds",
    unit="seconds",
    labels=_JOB,
    help="Wall seconds of one journal write and sync.",
    buckets=_SECONDS,
)
JOURNAL_ERRORS: Final = Counter(
    name="kuberoll_journal_errors_total",
    unit="errors",
    labels=_JOB,
    help="Failed journal writes or syncs.",
)
EVENT_LOOP_LAG_SECONDS: Final = Histogram(
    name="kuberoll_event_loop_lag_seconds",
    unit="seconds",
    labels=_JOB,
    help="Delay with which the event loop ran a timer.",
    buckets=_LAG_SECONDS,
)

POLICY_REQUESTS: Final = Counter(
    name="kuberoll_policy_requests_total",
    unit="requests",
    labels=(*_JOB, "outcome"),
    help="Requests sent to replicas, by outcome; only `answered` ones count as turns.",
)
POLICY_VAIN_SECONDS: Final = Counter(
    name="kuberoll_policy_vain_seconds_total",
    unit="seconds",
    labels=(*_JOB, "outcome"),
    help="Seconds for which replicas had requests in vain: `failed` and `lost` ones, which are sent again, from when "
    "they were sent until that was found out, and `aborted` ones, which are not waited for any more. Answers come "
    "whole: how many tokens had been generated is not known.",
)
POLICY_REPLICAS: Final = Gauge(
    name="kuberoll_policy_replicas",
    unit="replicas",
    labels=(*_JOB, "state"),
    help="Replicas that this worker knows, by the state of their circuit breaker.",
    over_processes="max",
)
POLICY_WAITING_REQUESTS: Final = Gauge(
    name="kuberoll_policy_waiting_requests",
    unit="requests",
    labels=_JOB,
    help="Requests that wait in the worker until a replica has room for them.",
)
POLICY_WINDOW_REQUESTS: Final = Gauge(
    name="kuberoll_policy_window_requests",
    unit="requests",
    labels=_JOB,
    help="Maximum number of concurrent requests from the worker to all replicas, learned from their refusals.",
)
REPLICA_SECONDS: Final = Counter(
    name="kuberoll_replica_seconds_total",
    unit="seconds",
    labels=_JOB,
    help="Seconds of all replicas that this worker uses, or waits for.",
)
REPLICA_IDLE_SECONDS: Final = Counter(
    name="kuberoll_replica_idle_seconds_total",
    unit="seconds",
    labels=(*_JOB, "cause"),
    help="Of kuberoll_replica_seconds_total, those without a request, sampled four times a second. Causes: cold start "
    "and unreachable (it does not answer), admission (requests wait in the worker), trainer (it lets nothing begin), "
    "tail (all trajectories have begun), environment, and no work (few are in flight). Every worker counts an idle "
    "replica, so use the ratio of the two.",
)
SESSIONS_MOVED: Final = Counter(
    name="kuberoll_sessions_moved_total",
    unit="sessions",
    labels=(*_JOB, "cause"),
    help="Trajectories that moved to another replica, which does not have their prefix cached, by cause.",
)

POLICY_LAG: Final = Histogram(
    name="kuberoll_policy_lag",
    unit="versions",
    labels=_JOB,
    help="Versions of weights between a trajectory's oldest token and the newest ones, when the trainer took it.",
    buckets=(0, 1, 2, 3, 4, 6, 8, 16, 32),
)
GROUPS_TAKEN: Final = Counter(
    name="kuberoll_groups_taken_total", unit="groups", labels=_JOB, help="Prompt groups that the trainer has taken."
)
GROUPS_READY: Final = Gauge(
    name="kuberoll_groups_ready",
    unit="groups",
    labels=_JOB,
    help="Prompt groups that have ended and that the trainer has read and not taken.",
)
STALE_TRAJECTORIES: Final = Counter(
    name="kuberoll_stale_trajectories_total",
    unit="trajectories",
    labels=_JOB,
    help="Finished trajectories that the trainer did not take because they were too old. Those that were stopped "
    "before their end are in kuberoll_dropped_trajectories_total.",
)
STALE_TOKENS: Final = Counter(
    name="kuberoll_stale_tokens_total",
    unit="tokens",
    labels=_JOB,
    help="Tokens generated for finished trajectories that were too old.",
)
TRAINER_WAITING_SECONDS: Final = Counter(
    name="kuberoll_trainer_waiting_seconds_total",
    unit="seconds",
    labels=_JOB,
    help="Seconds for which the trainer has waited for prompt groups.",
)
HELD_BACK_SECONDS: Final = Counter(
    name="kuberoll_held_back_seconds_total",
    unit="seconds",
    labels=_JOB,
    help="Seconds for which this worker could have begun a prompt group and the trainer did not allow it yet.",
)
PUBLICATIONS: Final = Counter(
    name="kuberoll_publications_total", unit="publications", labels=_JOB, help="Weights that the trainer has published."
)
PUBLISH_SECONDS: Final = Counter(
    name="kuberoll_publish_seconds_total",
    unit="seconds",
    labels=(*_JOB, "stage"),
    help="Seconds of publishing weights, by stage.",
)
DIRECT_PARTS: Final = Counter(
    name="kuberoll_direct_parts_total",
    unit="parts",
    labels=_JOB,
    help="Parts of journals that this worker has handed over to trainers on the direct path.",
)
DIRECT_BYTES: Final = Counter(
    name="kuberoll_direct_bytes_total",
    unit="bytes",
    labels=_JOB,
    help="Bytes of the parts in kuberoll_direct_parts_total.",
)
DIRECT_GAPS: Final = Counter(
    name="kuberoll_direct_gaps_total",
    unit="gaps",
    labels=_JOB,
    help="Answers on the direct path that lacked parts, after which the trainer lists the store; without the first one "
    "to each trainer, which always does.",
)
DIRECT_WAITING_REQUESTS: Final = Gauge(
    name="kuberoll_direct_waiting_requests",
    unit="requests",
    labels=_JOB,
    help="Requests of trainers for the next part that this worker holds now, one of each trainer; 64 at most.",
    over_processes="max",
)

SANDBOXES: Final = (
    SANDBOXES_IN_USE,
    SANDBOXES_WAITING,
    SANDBOX_STARTS,
    SANDBOX_START_SECONDS,
    SANDBOXES_AHEAD,
    SANDBOXES_PREPARED,
    SANDBOX_WAIT_SECONDS,
    SANDBOXES_LOST,
    GRADER_INPUTS_CHANGED,
    SANDBOX_REMOVALS,
    SANDBOXES_LEFT,
)

METERED: Final = SANDBOXES
"""Metrics that environments count themselves (`telemetry.meters`)."""

GROUPS: Final = (
    MetricGroup(
        "Trajectories",
        (
            TRAJECTORIES_PLANNED,
            TRAJECTORIES_STORED,
            TRAJECTORIES_ABANDONED,
            TRAJECTORIES_ACTIVE,
            TRAJECTORIES,
            TRAJECTORY_SECONDS,
            TRAJECTORY_TURNS,
            RESUMED_TURNS,
            EPISODES,
            EPISODES_CLOSED,
            EPISODE_RECOVERIES,
            AGENT_CALLS,
            DROPPED_TRAJECTORIES,
            DROPPED_TOKENS,
        ),
    ),
    MetricGroup(
        "Turns",
        (
            TURNS,
            TURN_WAITING_SECONDS,
            TURN_GENERATION_SECONDS,
            TURN_ENVIRONMENT_SECONDS,
            ENVIRONMENT_TIMEOUT_SECONDS,
            TOKENS,
        ),
    ),
    MetricGroup("Rewards", (TRAJECTORY_REWARD, REWARD)),
    MetricGroup("Failures", (FAILURES, RETRIES, INCIDENTS, WASTED_SECONDS, WASTED_TOKENS, PREFIX_VIOLATIONS)),
    MetricGroup(
        "The trainer",
        (
            POLICY_LAG,
            GROUPS_TAKEN,
            GROUPS_READY,
            STALE_TRAJECTORIES,
            STALE_TOKENS,
            TRAINER_WAITING_SECONDS,
            HELD_BACK_SECONDS,
            PUBLICATIONS,
            PUBLISH_SECONDS,
            DIRECT_PARTS,
            DIRECT_BYTES,
            DIRECT_GAPS,
            DIRECT_WAITING_REQUESTS,
        ),
    ),
    MetricGroup(
        "Request routing",
        (
            POLICY_REQUESTS,
            POLICY_VAIN_SECONDS,
            POLICY_REPLICAS,
            POLICY_WAITING_REQUESTS,
            POLICY_WINDOW_REQUESTS,
            REPLICA_SECONDS,
            REPLICA_IDLE_SECONDS,
            SESSIONS_MOVED,
        ),
    ),
    MetricGroup("Sandboxes", SANDBOXES),
    MetricGroup("The worker itself", (JOURNAL_SYNC_SECONDS, JOURNAL_ERRORS, EVENT_LOOP_LAG_SECONDS)),
)

METRICS: Final = metrics_by_name(GROUPS)
