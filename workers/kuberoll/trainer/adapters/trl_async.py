"""A run as the rollout worker of TRL's experimental `AsyncGRPOTrainer`, and its weights; needs TRL 1.16 or newer."""

from __future__ import annotations

import bisect
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kuberoll.trainer.adapters.rows import require_sampled_logprobs, require_sampling, rows_of
from kuberoll.trainer.adapters.trl import RunEnded
from kuberoll.trainer.advantages import AdvantageFunction, AdvantageName
from kuberoll.trainer.batch import NO_VERSION, Batch
from kuberoll.trainer.rollouts import Rollouts
from kuberoll_workers.data.record import TrajectoryRecord

if TYPE_CHECKING:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

_LOOK_SECONDS: Final = 0.5
_METRICS: Final = 4096


class VersionNumbers:
    """The trainer's count of its weights by the version that they were published as.

    AsyncGRPOTrainer counts its updates from 1 and drops what is too far behind its count; the run's versions go on
    from where they were.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._published: list[int] = []
        self._counts: list[int] = []
        self._newest: int | None = None
        self.count = 0

    def published(self, version: int) -> None:
        """Note the version of weights that the trainer has just published."""
        with self._lock:
            self._newest = version

    def counted(self, count: int) -> None:
        """Note the trainer's number of the weights that were published last."""
        with self._lock:
            self.count = count
            if self._newest is not None:
                self._published.append(self._newest)
                self._counts.append(count)
                self._newest = None

    def count_of(self, version: int) -> int:
        """The trainer's number of a version: that of the newest one published up to it, 0 for older ones.

        Without published versions a version is its own number; one that is unknown (-1) is the present one.
        """
        with self._lock:
            if version == NO_VERSION:
                return self.count
            if not self._published:
                return version
            place = bisect.bisect_right(self._published, version)
            return self._counts[place - 1] if place else 0


class RolloutWorker:
    """A run's prompt groups as TRL's `rollout_worker`: a thread that reads the run and fills TRL's queue.

    Each path of a trajectory is a sample; samples of a group share its number and the trajectory's advantage. Samples
    that are older than TRL's `max_staleness` are dropped by TRL. Rows without sampled tokens are left out, as TRL does.

    The groups in the queue count as taken: give `queue_size` the number of samples that a stop may lose.

    Attributes:
        rollout_buffer, metrics_queue: Those of TRL's protocol.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        *,
        advantages: AdvantageName | AdvantageFunction = "grpo",
        queue_size: int = 64,
        temperature: float = 1.0,
    ) -> None:
        """
        Args:
            temperature: That of the trainer's configuration; groups that were sampled otherwise are refused.
            advantages: As of `Rollouts.batches`. TRL's own worker divides by the standard deviation of the population,
                `grpo` by that of the sample.
            queue_size: Maximum number of samples that wait for the trainer; further groups stay in the run.
        """
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue(queue_size)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue(_METRICS)
        self.versions = VersionNumbers()
        self._rollouts = rollouts
        self._advantages = advantages
        self._temperature = temperature
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        # What reading says while nothing comes.
        self._waiting = "see whether the run goes on"
        self._last_group = time.monotonic()
        self._groups = 0

    def start(self) -> None:
        """Begin to read the run."""
        self._last_group = time.monotonic()
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name="kuberoll-rollouts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; calling it again does nothing."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def update_model_version(self, model_version: int) -> None:
        """Note the trainer's number of its newest weights."""
        self.versions.counted(model_version)

    def check_health(self, stale_after_s: float) -> None:
        """Check that groups come; TRL asks while its queue is empty.

        Raises:
            RunEnded: The run has delivered all its groups.
            RuntimeError: Reading failed, or no group came for so many seconds.
        """
        if isinstance(self._failure, RunEnded):
            raise self._failure
        if self._failure is not None:
            raise RuntimeError(f"reading {self._rollouts.location} failed: {self._failure}") from self._failure
        if (waited := time.monotonic() - self._last_group) > stale_after_s:
            raise RuntimeError(
                f"{self._rollouts.location}: no prompt group for {waited:.0f} s (heartbeat_stale_after_s="
                f"{stale_after_s:g}). Allow more time, or: {self._waiting}"
            )

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    for batch in self._rollouts.batches(1, advantages=self._advantages, timeout=_LOOK_SECONDS):
                        self._deliver(batch)
                        if self._stopping.is_set():
                            return
                except TimeoutError as error:
                    # Nothing came; look whether to stop.
                    self._waiting = str(error)
                    continue
                raise RunEnded(
                    f"{self._rollouts.location} has delivered its {self._rollouts.counts.groups} prompt groups, and "
                    "the trainer asks for more: end training with max_steps, or give the run more rows or epochs"
                )
        except Exception as error:
            self._failure = error

    def _deliver(self, batch: Batch) -> None:
        require_sampled_logprobs(self._rollouts.manifest.identity)
        require_sampling(batch, temperature=self._temperature)
        begun, waited = time.monotonic(), time.monotonic() - self._last_group
        for sample in samples_of(batch, group_id=self._groups, count_of=self.versions.count_of):
            while not self._stopping.is_set():
                sample.enqueued_at = time.time()
                try:
                    self.rollout_buffer.put(sample, timeout=_LOOK_SECONDS)
                except queue.Full:
                    continue
                break
        self._groups += 1
        self._last_group = time.monotonic()
        if not self.metrics_queue.full():
            self.metrics_queue.put_nowait(
                {"rollout/group_wait_s": waited, "rollout/backpressure_s": self._last_group - begun}
            )


def samples_of(batch: Batch, *, group_id: int, count_of: Callable[[int], int]) -> Iterator[RolloutSample]:
    """TRL's samples of a batch of one group, one for each row with sampled tokens.

    Args:
        count_of: The trainer's number of a version of weights.

    Raises:
        BatchUnfit: Versions of weights are not whole numbers.
    """
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    assert batch.advantages is not None
    trajectories = {trajectory.rollout_index: trajectory for trajectory in batch.groups[0].trajectories}
    rewards = [trajectory.total_reward for trajectory in trajectories.values()]
    for row in rows_of(batch):
        if not row.sampled.any():
            continue
        reward = float(batch.reward[row.number])
        before = len(row.prompt_ids)
        prompt, completion = _messages(trajectories[int(batch.rollout_index[row.number])])
        yield RolloutSample(
            prompt=prompt,
            completion=completion,
            input_ids=np.concatenate([row.prompt_ids, row.completion_ids]),
            completion_mask=np.concatenate([np.zeros(before, np.int64), row.sampled.astype(np.int64)]),
            old_log_probs=np.concatenate([np.zeros(before, np.float32), row.logprobs]),
            advantage=float(batch.advantages[row.number]),
            model_version=count_of(row.oldest_version),
            group_id=group_id,
            metrics={
                "reward": reward,
                "reward_std": float(np.std(rewards)),
                "rewards/environment": reward,
            },
        )


def _messages(trajectory: TrajectoryRecord) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """A trajectory's own messages before its first response, and the others, for TRL's logs."""
    texts = [{"role": message.role, "content": message.content} for message in trajectory.messages]
    first = next((place for place, message in enumerate(trajectory.messages) if message.sampled), len(texts))
    return texts[:first], texts[first:]


class WeightTransfer:
    """Publishing as TRL's `weight_transfer`: after each update the run's replicas get the trainer's weights.

    Nothing is paused: replicas pause themselves, between two tokens, for as long as they load.
    """

    def __init__(self, publish: Callable[[Mapping[str, Any]], Any], worker: RolloutWorker) -> None:
        """
        Args:
            publish: Called with the weights by name, which are valid during the call; returns what it published, with
                its `version`, a whole number that grows.
            worker: Whose samples' versions are compared with the published ones.
        """
        self._publish = publish
        self._worker = worker

    def init_weight_transfer(self) -> None:
        """Do nothing: there is no connection to open."""

    def pause(self) -> None:
        """Do nothing: replicas pause themselves."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Publish all weights.

        Args:
            iterator: Names and tensors.
        """
        self._worker.versions.published(int(self._publish(dict(iterator)).version))

    def resume(self) -> None:
        """Do nothing: replicas resume by themselves."""

    def destroy(self) -> None:
        """Do nothing: there is no connection to close."""
