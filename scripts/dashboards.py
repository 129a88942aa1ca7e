"""Makes the Grafana dashboards of the chart: `python scripts/dashboards.py [--check]`.

Every query is written once, here; `tests/monitoring` runs each of them against a Prometheus that scraped a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from grafana_foundation_sdk.builders import bargauge, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from scripts.generated import ROOT, write_or_check

OUTPUT: Final = ROOT / "charts" / "kuberoll" / "files" / "dashboards"

JOB: Final = 'namespace=~"$namespace", rolloutjob=~"$job"'
ENVIRONMENT: Final = f'{JOB}, environment=~"$environment"'
FLEET: Final = 'namespace=~"$namespace"'
RATE: Final = "[$__rate_interval]"
DATA: Final = dashboard.DataSourceRef(type_val="prometheus", uid="$datasource")

Kind = Literal["lines", "stacked", "number", "bars", "heat", "table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel.

    Attributes:
        about: What it shows, and what to make of it.
        queries: Legend and PromQL.
        limits: Values from which it is yellow, and red.
        width: Of 24.
        bound: The largest value of the axis.
    """

    title: str
    about: str
    queries: Sequence[tuple[str, str]]
    unit: str
    kind: Kind = "lines"
    limits: Sequence[float] = ()
    width: int = 8
    bound: float | None = None
    decimals: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One dashboard: rows of panels."""

    uid: str
    title: str
    about: str
    variables: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Panel]]] = field(default_factory=list)


def quantiles(metric: str, labels: str, by: str = "") -> list[tuple[str, str]]:
    """p50, p95 and p99 of a histogram."""
    found = []
    for name, part in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
        groups = f"le, {by}" if by else "le"
        legend = f"{{{{{by}}}}} {name}" if by else name
        found.append(
            (legend, f"histogram_quantile({part}, sum by ({groups}) (rate({metric}_bucket{{{labels}}}{RATE})))")
        )
    return found


ROLLOUTS: Final = Page(
    uid="kuberoll-rollouts",
    title="KubeRoll / Rollouts",
    about="One job: how far it is, how fast, where the time of its turns goes, what it is rewarded.",
    variables=("namespace", "job", "environment"),
    rows=[
        (
            "Progress",
            [
                Panel(
                    title="Progress",
                    about="Trajectories that are stored, of those that are planned.",
                    queries=[
                        (
                            "done",
                            f"(sum(kuberoll_trajectories_stored{{{JOB}}}) + sum(kuberoll_trajectories_abandoned{{{JOB}}}))"
                            f" / sum(kuberoll_trajectories_planned{{{JOB}}})",
                        )
                    ],
                    unit="percentunit",
                    kind="number",
                    width=4,
                    bound=1,
                ),
                Panel(
                    title="Time left",
                    about="What is planned and not there yet, at the rate of the last ten minutes.",
                    queries=[
                        (
                            "left",
                            f"(sum(kuberoll_trajectories_planned{{{JOB}}}) - sum(kuberoll_trajectories_stored{{{JOB}}})"
                            f" - sum(kuberoll_trajectories_abandoned{{{JOB}}}))"
                            f" / sum(rate(kuberoll_trajectories_total{{{JOB}}}[10m]))",
                        )
                    ],
                    unit="s",
                    kind="number",
                    width=4,
                ),
                Panel(
                    title="Generated tokens per second and replica",
                    about="Tokens that the engine generated, per replica that answers; with one GPU per replica this is "
                    "tokens per second and GPU.",
                    queries=[
                        (
                            "tokens",
                            f'sum(rate(kuberoll_tokens_total{{{JOB}, kind="generated"}}{RATE}))'
                            f' / max(kuberoll_policy_replicas{{{JOB}, state="closed"}})',
                        )
                    ],
                    unit="short",
                    kind="number",
                    width=4,
                    decimals=0,
                ),
                Panel(
                    title="Mean reward",
                    about="Of the trajectories that ended in the range shown; failed ones have no reward.",
                    queries=[
                        (
                            "reward",
                            f'(sum(increase(kuberoll_reward_total{{{ENVIRONMENT}, sign="positive"}}[$__range]))'
                            f' - sum(increase(kuberoll_reward_total{{{ENVIRONMENT}, sign="negative"}}[$__range])))'
                            f" / sum(increase(kuberoll_trajectory_turns_count{{{ENVIRONMENT}}}[$__range]))",
                        )
                    ],
                    unit="short",
                    kind="number",
                    width=4,
                    decimals=3,
                ),
                Panel(
                    title="Failed",
                    about="Trajectories given up, of all that ended in the range shown.",
                    queries=[
                        (
                            "failed",
                            f'(sum(increase(kuberoll_trajectories_total{{{ENVIRONMENT}, stop_reason="failed"}}[$__range]))'
                            f" or vector(0)) / sum(increase(kuberoll_trajectories_total{{{ENVIRONMENT}}}[$__range]))",
                        )
                    ],
                    unit="percentunit",
                    kind="number",
                    limits=(0.01, 0.1),
                    width=4,
                ),
                Panel(
                    title="Prefix reused",
                    about="Prompt tokens whose key-value cache the engine had already. In multi-turn rollouts most should "
                    "be: the turns of a trajectory stay with the replica that has its prefix.",
                    queries=[
                        (
                            "reused",
                            f'sum(increase(kuberoll_tokens_total{{{ENVIRONMENT}, kind="cached"}}[$__range]))'
                            f' / sum(increase(kuberoll_tokens_total{{{ENVIRONMENT}, kind="prompt"}}[$__range]))',
                        )
                    ],
                    unit="percentunit",
                    kind="number",
                    width=4,
                    bound=1,
                ),
            ],
        ),
        (
            "Speed",
            [
                Panel(
                    title="Tokens per second",
                    about="By kind: generated by the policy, answered by environments, and prompt tokens that the engine "
                    "had to compute.",
                    queries=[
                        ("generated", f'sum(rate(kuberoll_tokens_total{{{ENVIRONMENT}, kind="generated"}}{RATE}))'),
                        ("environment", f'sum(rate(kuberoll_tokens_total{{{ENVIRONMENT}, kind="environment"}}{RATE}))'),
                        (
                            "prompt, not cached",
                            f'sum(rate(kuberoll_tokens_total{{{ENVIRONMENT}, kind="prompt"}}{RATE}))'
                            f' - sum(rate(kuberoll_tokens_total{{{ENVIRONMENT}, kind="cached"}}{RATE}))',
                        ),
                    ],
                    unit="short",
                ),
                Panel(
                    title="Where a turn's time goes",
                    about="Mean seconds of a turn by phase, stacked. Generation includes queueing in the engine; waiting is "
                    "what a trajectory spends between its turns: for its batch (Lockstep), for the journal, for a place.",
                    queries=[
                        (
                            phase,
                            f"sum(rate(kuberoll_turn_{phase}_seconds_sum{{{ENVIRONMENT}}}{RATE}))"
                            f" / sum(rate(kuberoll_turn_{phase}_seconds_count{{{ENVIRONMENT}}}{RATE}))",
                        )
                        for phase in ("generation", "environment", "waiting")
                    ],
                    unit="s",
                    kind="stacked",
                ),
                Panel(
                    title="Trajectories in flight",
                    about="By what they wait for. All in generation: the GPUs are the limit. All in environment: the "
                    "environments are.",
                    queries=[("{{state}}", f"sum by (state) (kuberoll_trajectories_active{{{ENVIRONMENT}}})")],
                    unit="short",
                    kind="stacked",
                ),
                Panel(
                    title="Trajectories per minute",
                    about="By how they ended.",
                    queries=[
                        (
                            "{{stop_reason}}",
                            f"60 * sum by (stop_reason) (rate(kuberoll_trajectories_total{{{ENVIRONMENT}}}{RATE}))",
                        )
                    ],
                    unit="short",
                    kind="stacked",
                ),
                Panel(
                    title="Seconds of a trajectory",
                    about="The tail: how long the slowest ones take that the last batch waits for.",
                    queries=quantiles("kuberoll_trajectory_seconds", ENVIRONMENT),
                    unit="s",
                ),
                Panel(
                    title="Turns by number",
                    about="Turns per second, by their number in the trajectory.",
                    queries=[("turn {{turn}}", f"sum by (turn) (rate(kuberoll_turns_total{{{ENVIRONMENT}}}{RATE}))")],
                    unit="short",
                    kind="stacked",
                ),
            ],
        ),
        (
            "Reward",
            [
                Panel(
                    title="Mean reward by environment",
                    about="Of the trajectories that ended within five minutes.",
                    queries=[
                        (
                            "{{environment}}",
                            f'(sum by (environment) (rate(kuberoll_reward_total{{{ENVIRONMENT}, sign="positive"}}[5m]))'
                            f' - sum by (environment) (rate(kuberoll_reward_total{{{ENVIRONMENT}, sign="negative"}}[5m])))'
                            f" / sum by (environment) (rate(kuberoll_trajectory_turns_count{{{ENVIRONMENT}}}[5m]))",
                        )
                    ],
                    unit="short",
                    decimals=3,
                ),
                Panel(
                    title="Spread of rewards",
                    about="How many trajectories had which reward. One bright line at one value means that nothing is to be "
                    "learned.",
                    queries=[
                        ("{{le}}", f"sum by (le) (increase(kuberoll_trajectory_reward_bucket{{{ENVIRONMENT}}}{RATE}))")
                    ],
                    unit="short",
                    kind="heat",
                ),
                Panel(
                    title="Stop reasons",
                    about="Of the trajectories that ended in the range shown. Many truncated ones: maxSequenceLength or "
                    "maxTokens is short.",
                    queries=[
                        (
                            "{{stop_reason}}",
                            f"sum by (stop_reason) (increase(kuberoll_trajectories_total{{{ENVIRONMENT}}}[$__range]))",
                        )
                    ],
                    unit="short",
                    kind="bars",
                    decimals=0,
                ),
            ],
        ),
        (
            "Sandboxes",
            [
                Panel(
                    title="Sandboxes of trajectories",
                    about="In use, and those that trajectories wait for. Many that wait for long: starts are the limit.",
                    queries=[
                        ("in use", f"sum(kuberoll_sandboxes_in_use{{{ENVIRONMENT}}})"),
                        ("waiting", f"sum(kuberoll_sandboxes_waiting{{{ENVIRONMENT}}})"),
                    ],
                    unit="short",
                    kind="stacked",
                    width=6,
                ),
                Panel(
                    title="Starts of sandboxes per minute",
                    about="By result. The trajectories of failed ones are tried again, or fail.",
                    queries=[
                        (
                            "{{result}}",
                            f"60 * sum by (result) (rate(kuberoll_sandbox_starts_total{{{ENVIRONMENT}}}{RATE}))",
                        )
                    ],
                    unit="short",
                    width=6,
                ),
                Panel(
                    title="Seconds of a sandbox's start",
                    about="Of those that succeeded, the wait for other starts included. The first start of an image has to "
                    "get it.",
                    queries=quantiles("kuberoll_sandbox_start_seconds", ENVIRONMENT),
                    unit="s",
                    width=6,
                ),
                Panel(
                    title="Sandboxes lost and left",
                    about="Lost ones were gone before their trajectory had ended, which then starts over. Those that "
                    "could not be removed are left until their lease ends; both should be none.",
                    queries=[
                        ("lost per minute", f"60 * sum(rate(kuberoll_sandboxes_lost_total{{{ENVIRONMENT}}}{RATE}))"),
                        (
                            "not removed per minute",
                            f'60 * sum(rate(kuberoll_sandbox_removals_total{{{ENVIRONMENT}, result="failed"}}{RATE}))',
                        ),
                        ("left now", f"sum(kuberoll_sandboxes_left{{{ENVIRONMENT}}})"),
                    ],
                    unit="short",
                    width=6,
                ),
            ],
        ),
        (
            "Trainer",
            [
                Panel(
                    title="Policy lag",
                    about="Versions of the weights between a trajectory's oldest token and the newest weights when the "
                    "trainer took it, of jobs with rollout.onPolicy.",
                    queries=quantiles("kuberoll_policy_lag", JOB),
                    unit="short",
                ),
                Panel(
                    title="Prompt groups",
                    about="Taken by the trainer per second, and those that are ready and wait for it.",
                    queries=[
                        ("taken per second", f"sum(rate(kuberoll_groups_taken_total{{{JOB}}}{RATE}))"),
                        ("ready", f"sum(kuberoll_groups_ready{{{JOB}}})"),
                    ],
                    unit="short",
                ),
                Panel(
                    title="Too old",
                    about="Share of the generated tokens that the trainer did not take because they were too old: less "
                    "with a smaller rollout.onPolicy.maxAhead, larger batches, or onStale: Finish.",
                    queries=[
                        (
                            "finished",
                            f"sum(rate(kuberoll_stale_tokens_total{{{JOB}}}{RATE})) / "
                            f'sum(rate(kuberoll_tokens_total{{{JOB}, kind="generated"}}{RATE}))',
                        ),
                    ],
                    unit="percentunit",
                    bound=1,
                ),
                Panel(
                    title="Who waits for whom",
                    about="Share of the time: the trainer for prompt groups, and a worker for the trainer. The one that "
                    "never waits is the limit.",
                    queries=[
                        ("trainer", f"sum(rate(kuberoll_trainer_waiting_seconds_total{{{JOB}}}{RATE}))"),
                        ("workers", f"avg(rate(kuberoll_held_back_seconds_total{{{JOB}}}{RATE}))"),
                    ],
                    unit="percentunit",
                    bound=1,
                ),
                Panel(
                    title="Publishing weights",
                    about="Seconds of one publication, by stage.",
                    queries=[
                        (
                            "{{stage}}",
                            f"sum by (stage) (rate(kuberoll_publish_seconds_total{{{JOB}}}{RATE})) / on () group_left "
                            f"sum(rate(kuberoll_publications_total{{{JOB}}}{RATE}))",
                        )
                    ],
                    unit="s",
                ),
                Panel(
                    title="Direct path",
                    about="Of jobs whose trainer takes what workers write to an object store from them: parts handed over "
                    "per second, answers per second after which it lists the store, and the most trainers that wait for "
                    "a worker.",
                    queries=[
                        ("parts per second", f"sum(rate(kuberoll_direct_parts_total{{{JOB}}}{RATE}))"),
                        ("gaps per second", f"sum(rate(kuberoll_direct_gaps_total{{{JOB}}}{RATE}))"),
                        ("waiting", f"max(kuberoll_direct_waiting_requests{{{JOB}}})"),
                    ],
                    unit="short",
                ),
            ],
        ),
        (
            "Trouble",
            [
                Panel(
                    title="Trajectories given up",
                    about="By who was at fault and at what stage; failures.jsonl has the causes.",
                    queries=[
                        (
                            "{{kind}} in {{stage}}",
                            f"sum by (kind, stage) (increase(kuberoll_failures_total{{{ENVIRONMENT}}}{RATE}))",
                        )
                    ],
                    unit="short",
                ),
                Panel(
                    title="Tries again",
                    about="Operations that failed and were tried again, per second.",
                    queries=[("{{stage}}", f"sum by (stage) (rate(kuberoll_retries_total{{{ENVIRONMENT}}}{RATE}))")],
                    unit="short",
                ),
                Panel(
                    title="Environment steps",
                    about="Seconds of one step, by environment.",
                    queries=quantiles("kuberoll_turn_environment_seconds", ENVIRONMENT, "environment")[1:],
                    unit="s",
                ),
                Panel(
                    title="Requests that were not answered",
                    about="By what came of them; all were tried again, and only refused ones end a trajectory.",
                    queries=[
                        (
                            "{{outcome}}",
                            f'sum by (outcome) (rate(kuberoll_policy_requests_total{{{JOB}, outcome!="answered"}}{RATE}))',
                        )
                    ],
                    unit="short",
                ),
                Panel(
                    title="Requests in vain",
                    about="Requests that replicas have at a time, on the mean, and whose generation comes to nothing: those"
                    " that fail or are lost with their replica are sent again, aborted ones are not.",
                    queries=[
                        (
                            "{{outcome}}",
                            f"sum by (outcome) (rate(kuberoll_policy_vain_seconds_total{{{JOB}}}{RATE}))",
                        )
                    ],
                    unit="short",
                ),
                Panel(
                    title="Replicas as the workers see them",
                    about="By the state of their circuit breaker: closed ones are used, open ones have failed and are "
                    "probed now and then.",
                    queries=[("{{state}}", f"max by (state) (kuberoll_policy_replicas{{{JOB}}})")],
                    unit="short",
                ),
                Panel(
                    title="Trajectories moved to another replica",
                    about="Per second, by cause: each computes its prefix anew.",
                    queries=[("{{cause}}", f"sum by (cause) (rate(kuberoll_sessions_moved_total{{{JOB}}}{RATE}))")],
                    unit="short",
                ),
                Panel(
                    title="Idle replicas by cause",
                    about="Share of the replicas' time without a request. Tail: fewer replicas at the end, or shorter "
                    "limits; environment and no work: more trajectories in flight; admission: more replicas; trainer: see "
                    "the row Trainer.",
                    queries=[
                        (
                            "{{cause}}",
                            f"sum by (cause) (rate(kuberoll_replica_idle_seconds_total{{{JOB}}}{RATE})) / ignoring (cause) "
                            f"group_left sum (rate(kuberoll_replica_seconds_total{{{JOB}}}{RATE}))",
                        )
                    ],
                    unit="percentunit",
                    kind="stacked",
                ),
                Panel(
                    title="Event loop lag",
                    about="How late the workers' event loops run. Above some ten milliseconds the worker, not the GPU, is "
                    "the limit: more workers, or Process isolation for a busy environment.",
                    queries=quantiles("kuberoll_event_loop_lag_seconds", JOB)[1:],
                    unit="s",
                    limits=(0.1, 1),
                ),
                Panel(
                    title="Journal",
                    about="Seconds of one write and sync, in which many trajectories are stored at once.",
                    queries=quantiles("kuberoll_journal_sync_seconds", JOB)[1:],
                    unit="s",
                ),
                Panel(
                    title="Waiting for a replica",
                    about="Requests that wait in the workers, beside those that they send at once.",
                    queries=[
                        ("waiting", f"sum(kuberoll_policy_waiting_requests{{{JOB}}})"),
                        ("sent at once, at most", f"sum(kuberoll_policy_window_requests{{{JOB}}})"),
                    ],
                    unit="short",
                ),
            ],
        ),
    ],
)

FLEET_PAGE: Final = Page(
    uid="kuberoll-fleet",
    title="KubeRoll / Fleet",
    about="All jobs, and the operator that runs them.",
    variables=("namespace",),
    rows=[
        (
            "Jobs",
            [
                Panel(
                    title="Jobs by phase",
                    about="RolloutJobs that are there.",
                    queries=[("{{phase}}", "max by (phase) (kuberoll_operator_jobs)")],
                    unit="short",
                    kind="stacked",
                    width=6,
                ),
                Panel(
                    title="Engine replicas",
                    about="Ready and desired, of all jobs that start or run: what holds GPUs.",
                    queries=[
                        (
                            "{{state}}",
                            f"sum by (state) (max by (namespace, rolloutjob, state)"
                            f" (kuberoll_operator_generation_replicas{{{FLEET}}}))",
                        )
                    ],
                    unit="short",
                    width=6,
                ),
                Panel(
                    title="GPUs",
                    about="Held by ready replicas, and wanted, of all jobs that start or run.",
                    queries=[
                        (
                            "{{state}}",
                            f"sum by (state) (max by (namespace, rolloutjob, state)"
                            f" (kuberoll_operator_generation_gpus{{{FLEET}}}))",
                        )
                    ],
                    unit="short",
                    width=6,
                ),
                Panel(
                    title="Idle GPUs",
                    about="Of ready replicas of jobs in which no trajectory waits for generation: they do nothing.",
                    queries=[
                        (
                            "idle",
                            "sum(max by (namespace, rolloutjob)"
                            f' (kuberoll_operator_generation_gpus{{{FLEET}, state="ready"}})'
                            " unless on (namespace, rolloutjob) (sum by (namespace, rolloutjob)"
                            f' (kuberoll_trajectories_active{{{FLEET}, state="generation"}}) > 0)) or vector(0)',
                        )
                    ],
                    unit="short",
                    limits=(1, 8),
                    width=6,
                ),
                Panel(
                    title="Jobs that wait",
                    about="For something that somebody may have to resolve: the reason of kubectl get, and for how many"
                    " minutes of the last hour. kubectl describe rlj has the message.",
                    queries=[
                        (
                            "{{namespace}}/{{rolloutjob}}: {{reason}} ({{condition}})",
                            # One that waits since less than a step of the inner query has none yet: 0 minutes.
                            "sort_desc((sum by (namespace, rolloutjob, condition, reason)"
                            f" (sum_over_time(kuberoll_operator_waiting_jobs{{{FLEET}}}[1h:15s])) / 4 or"
                            " sum by (namespace, rolloutjob, condition, reason)"
                            f" (kuberoll_operator_waiting_jobs{{{FLEET}}}) * 0) and on"
                            " (namespace, rolloutjob, condition, reason)"
                            f" kuberoll_operator_waiting_jobs{{{FLEET}}})",
                        )
                    ],
                    unit="minutes",
                    kind="table",
                    width=24,
                ),
                Panel(
                    title="Generated tokens per second",
                    about="The busiest ten jobs.",
                    queries=[
                        (
                            "{{namespace}}/{{rolloutjob}}",
                            "topk(10, sum by (namespace, rolloutjob)"
                            f' (rate(kuberoll_tokens_total{{{FLEET}, kind="generated"}}{RATE})))',
                        )
                    ],
                    unit="short",
                ),
                Panel(
                    title="Slowest environments",
                    about="p95 of a step, the slowest ten.",
                    queries=[
                        (
                            "{{rolloutjob}} {{environment}}",
                            "topk(10, histogram_quantile(0.95, sum by (le, rolloutjob, environment)"
                            f" (rate(kuberoll_turn_environment_seconds_bucket{{{FLEET}}}{RATE}))))",
                        )
                    ],
                    unit="s",
                ),
                Panel(
                    title="Failing jobs",
                    about="Trajectories given up, of all that ended: the worst ten.",
                    queries=[
                        (
                            "{{namespace}}/{{rolloutjob}}",
                            "topk(10, sum by (namespace, rolloutjob)"
                            f' (rate(kuberoll_trajectories_total{{{FLEET}, stop_reason="failed"}}[10m]))'
                            " / sum by (namespace, rolloutjob)"
                            f" (rate(kuberoll_trajectories_total{{{FLEET}}}[10m])))",
                        )
                    ],
                    unit="percentunit",
                    limits=(0.01, 0.1),
                ),
            ],
        ),
        (
            "Operator",
            [
                Panel(
                    title="Leader",
                    about="Operators that lead: 1, whatever their number.",
                    queries=[("leaders", "sum(kuberoll_operator_leader)")],
                    unit="short",
                    kind="number",
                    width=4,
                    decimals=0,
                ),
                Panel(
                    title="Waiting jobs",
                    about="Jobs that wait for a reconcile.",
                    queries=[("waiting", "max(kuberoll_operator_queue_depth)")],
                    unit="short",
                    kind="number",
                    limits=(50, 500),
                    width=4,
                    decimals=0,
                ),
                Panel(
                    title="Reconciles",
                    about="Per second, by how they ended.",
                    queries=[("{{result}}", f"sum by (result) (rate(kuberoll_operator_reconciles_total{RATE}))")],
                    unit="short",
                ),
                Panel(
                    title="Reconcile seconds",
                    about="Of one reconcile, and of the wait before it.",
                    queries=[
                        (
                            f"{name} p99",
                            f"histogram_quantile(0.99, sum by (le) (rate({metric}_bucket{RATE})))",
                        )
                        for name, metric in (
                            ("reconcile", "kuberoll_operator_reconcile_seconds"),
                            ("wait", "kuberoll_operator_queue_wait_seconds"),
                        )
                    ],
                    unit="s",
                ),
                Panel(
                    title="Errors",
                    about="Per minute, by the API server's reason.",
                    queries=[("{{reason}}", f"60 * sum by (reason) (rate(kuberoll_operator_errors_total{RATE}))")],
                    unit="short",
                ),
                Panel(
                    title="Requests to the API server",
                    about="Per second, by verb; watches not counted.",
                    queries=[("{{verb}}", f"sum by (verb) (rate(kuberoll_operator_api_requests_total{RATE}))")],
                    unit="short",
                    kind="stacked",
                ),
                Panel(
                    title="From creation to …",
                    about="Seconds until generation was ready, the first trajectory ended, and the job was complete (p95).",
                    queries=[
                        (
                            "{{milestone}}",
                            "histogram_quantile(0.95, sum by (le, milestone)"
                            " (increase(kuberoll_operator_milestone_seconds_bucket[1h])))",
                        )
                    ],
                    unit="s",
                ),
            ],
        ),
    ],
)

GENERATION: Final = Page(
    uid="kuberoll-generation",
    title="KubeRoll / Generation",
    about="The engines of a job: vLLM and Ray Serve, replica by replica.",
    variables=("namespace", "job"),
    rows=[
        (
            "Engine",
            [
                Panel(
                    title="KV cache in use",
                    about="Of each replica. Near 100 % requests are preempted and computed anew.",
                    queries=[("{{ReplicaId}}", f"max by (ReplicaId) (ray_vllm_kv_cache_usage_perc{{{JOB}}})")],
                    unit="percentunit",
                    limits=(0.85, 0.97),
                    bound=1,
                ),
                Panel(
                    title="Prefix hits",
                    about="Prompt tokens that were in the cache already, by replica.",
                    queries=[
                        (
                            "{{ReplicaId}}",
                            f"sum by (ReplicaId) (rate(ray_vllm_prefix_cache_hits_total{{{JOB}}}{RATE}))"
                            f" / sum by (ReplicaId) (rate(ray_vllm_prefix_cache_queries_total{{{JOB}}}{RATE}))",
                        )
                    ],
                    unit="percentunit",
                    bound=1,
                ),
                Panel(
                    title="Running and waiting",
                    about="Requests in the batch (its size), and requests that wait for a place in it.",
                    queries=[
                        ("running {{ReplicaId}}", f"max by (ReplicaId) (ray_vllm_num_requests_running{{{JOB}}})"),
                        ("waiting {{ReplicaId}}", f"max by (ReplicaId) (ray_vllm_num_requests_waiting{{{JOB}}})"),
                    ],
                    unit="short",
                ),
                Panel(
                    title="Generated tokens per second",
                    about="By replica.",
                    queries=[
                        (
                            "{{ReplicaId}}",
                            f"sum by (ReplicaId) (rate(ray_vllm_generation_tokens_total{{{JOB}}}{RATE}))",
                        )
                    ],
                    unit="short",
                    kind="stacked",
                ),
                Panel(
                    title="Time to first token",
                    about="Queueing and prefill.",
                    queries=quantiles("ray_vllm_time_to_first_token_seconds", JOB),
                    unit="s",
                ),
                Panel(
                    title="Time per token",
                    about="After the first, within one request.",
                    queries=quantiles("ray_vllm_request_time_per_output_token_seconds", JOB),
                    unit="s",
                ),
                Panel(
                    title="Preemptions",
                    about="Requests thrown out of the cache, per minute: fewer trajectories at once, or more GPUs.",
                    queries=[
                        (
                            "{{ReplicaId}}",
                            f"60 * sum by (ReplicaId) (rate(ray_vllm_num_preemptions_total{{{JOB}}}{RATE}))",
                        )
                    ],
                    unit="short",
                ),
                Panel(
                    title="Prompt tokens per second",
                    about="By replica; cached ones included.",
                    queries=[
                        ("{{ReplicaId}}", f"sum by (ReplicaId) (rate(ray_vllm_prompt_tokens_total{{{JOB}}}{RATE}))")
                    ],
                    unit="short",
                    kind="stacked",
                ),
                Panel(
                    title="Seconds of a request",
                    about="In the engine, from its arrival to its last token.",
                    queries=quantiles("ray_vllm_e2e_request_latency_seconds", JOB),
                    unit="s",
                ),
                Panel(
                    title="Self-check: largest difference",
                    about="Of a token's log-probabilities, reported and scored once more, nats: rounding, or a fault.",
                    queries=[
                        (
                            "{{ReplicaId}}",
                            f"max by (ReplicaId) (ray_kuberoll_self_check_largest_difference_nats{{{JOB}}})",
                        )
                    ],
                    unit="short",
                ),
                Panel(
                    title="Self-check: responses per minute",
                    about="Scored once more, of those that ended.",
                    queries=[
                        (
                            "scored",
                            f"60 * sum(rate(ray_kuberoll_self_check_checked_responses_total{{{JOB}}}{RATE}))",
                        ),
                        ("ended", f"60 * sum(rate(ray_kuberoll_self_check_responses_total{{{JOB}}}{RATE}))"),
                    ],
                    unit="short",
                ),
            ],
        ),
        (
            "Ray Serve",
            [
                Panel(
                    title="Requests under way",
                    about="At each replica of the Serve deployment.",
                    queries=[("{{replica}}", f"sum by (replica) (ray_serve_replica_processing_queries{{{JOB}}})")],
                    unit="short",
                ),
                Panel(
                    title="Requests per second",
                    about="That the deployment processed.",
                    queries=[
                        (
                            "{{replica}}",
                            f"sum by (replica) (rate(ray_serve_deployment_request_counter_total{{{JOB}}}{RATE}))",
                        )
                    ],
                    unit="short",
                ),
                Panel(
                    title="Milliseconds in a replica",
                    about="From the request's arrival to its answer.",
                    queries=quantiles("ray_serve_deployment_processing_latency_ms", JOB),
                    unit="ms",
                ),
            ],
        ),
    ],
)

PAGES: Final = (ROLLOUTS, FLEET_PAGE, GENERATION)

_VARIABLES: Final = {
    "namespace": ("Namespace", "label_values(kuberoll_operator_generation_replicas, namespace)"),
    "job": ("Job", 'label_values({__name__=~"kuberoll_event_loop_lag_seconds_count|ray_vllm_num_requests_running", '
            'namespace=~"$namespace"}, rolloutjob)'),
    "environment": ("Environment", 'label_values(kuberoll_turns_total{namespace=~"$namespace", rolloutjob=~"$job"}, environment)'),
}  # fmt: skip


def build(page: Page) -> dashboard.Dashboard:
    """The dashboard of a page."""
    made = (
        dashboards.Dashboard(page.title)
        .uid(page.uid)
        .description(page.about)
        .tags(["kuberoll"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .editable()
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboards.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .link(
            dashboards.DashboardLink("KubeRoll")
            .type(dashboard.DashboardLinkType.DASHBOARDS)
            .tags(["kuberoll"])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
    )
    for name in page.variables:
        label, query = _VARIABLES[name]
        made = made.with_variable(
            dashboards.QueryVariable(name)
            .label(label)
            .datasource(DATA)
            .query(query)
            .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
            .include_all(True)
            # Empty too: a run on a laptop has no namespace.
            .all_value(".*")
            .multi(True)
            .current(dashboard.VariableOption(text="All", value="$__all"))
        )
    for title, panels in page.rows:
        made = made.with_row(dashboards.Row(title))
        for panel in panels:
            made = made.with_panel(_panel(panel))
    return made.build()


def _panel(panel: Panel) -> Any:
    match panel.kind:
        case "number":
            made: Any = stat.Panel().graph_mode(common.BigValueGraphMode.AREA).reduce_options(_last())
        case "bars":
            made = bargauge.Panel().orientation(common.VizOrientation.HORIZONTAL).reduce_options(_last())
        case "heat":
            made = heatmap.Panel().calculate(False)
        case "table":
            # One row for each series, a column for each of its labels.
            made = table.Panel().with_transformation(
                dashboard.DataTransformerConfig(
                    id_val="organize", options={"excludeByName": {"Time": True}, "renameByName": {"Value": panel.unit}}
                )
            )
        case _:
            stacked = panel.kind == "stacked"
            mode = common.StackingMode.NORMAL if stacked else common.StackingMode.NONE
            made = (
                timeseries.Panel()
                .fill_opacity(40 if stacked else 10)
                .line_width(1)
                .show_points(common.VisibilityMode.NEVER)
                .stacking(common_builders.StackingConfig().mode(mode))
                .legend(
                    common_builders.VizLegendOptions()
                    .display_mode(common.LegendDisplayMode.LIST)
                    .placement(common.LegendPlacement.BOTTOM)
                    .show_legend(True)
                )
                .tooltip(common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
            )
            if panel.limits:
                made = made.thresholds_style(
                    common_builders.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.LINE)
                )
    made = (
        made.title(panel.title)
        .description(panel.about)
        .datasource(DATA)
        .span(panel.width)
        .height(4 if panel.kind == "number" else 8)
    )
    if panel.kind not in {"heat", "table"}:
        made = made.unit(panel.unit).thresholds(_limits(panel.limits))
        if panel.bound is not None:
            made = made.max(panel.bound)
        if panel.decimals is not None:
            made = made.decimals(panel.decimals)
    instant = panel.kind in {"number", "bars", "table"}
    for number, (legend, query) in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query).legend_format(legend).ref_id(chr(ord("A") + number))
        if panel.kind == "heat":
            target = target.format(PromQueryFormat.HEATMAP)
        if panel.kind == "table":
            target = target.format(PromQueryFormat.TABLE)
        made = made.with_target(target.instant() if instant else target.range())
    return made


def _last() -> common_builders.ReduceDataOptions:
    return common_builders.ReduceDataOptions().calcs(["lastNotNull"])


def _limits(values: Iterable[float]) -> dashboards.ThresholdsConfig:
    colors = ("green", "yellow", "red")
    steps = [dashboard.Threshold(value=None, color=colors[0])]
    steps += [dashboard.Threshold(value=value, color=color) for value, color in zip(values, colors[1:], strict=False)]
    return dashboards.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps)


def files() -> dict[Path, str]:
    """The dashboards as files, by path; the same bytes for the same pages."""
    return {
        OUTPUT / f"{page.uid.removeprefix('kuberoll-')}.json": JSONEncoder(sort_keys=True, indent=2).encode(build(page))
        + "\n"
        for page in PAGES
    }


def main() -> None:
    """The command's entry point."""
    write_or_check(files())


if __name__ == "__main__":
    main()
