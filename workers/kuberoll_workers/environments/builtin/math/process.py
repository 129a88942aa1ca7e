"""Client of the algebra process, which answers questions by `math.algebra`."""

from __future__ import annotations

from kuberoll_workers.environments.builtin.question_process import CPU_SECONDS, QuestionProcess


class AlgebraProcess(QuestionProcess):
    """Client of the algebra process. Thread-safe; one question is answered at a time."""

    def __init__(self, *, cpu_seconds: float = CPU_SECONDS) -> None:
        super().__init__("kuberoll_workers.environments.builtin.math.algebra", cpu_seconds=cpu_seconds)

    def ask(self, question: str, truth: str, answer: str) -> bool | None:
        """Answer to one of `algebra.QUESTIONS`; None if one of the two texts is not mathematics.

        Raises:
            LimitExceeded, ProcessFailed: See `QuestionProcess.reply`.
        """
        reply: bool | None = self.reply([question, truth, answer])
        return reply
