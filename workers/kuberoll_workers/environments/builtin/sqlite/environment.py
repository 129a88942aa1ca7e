"""SQLite: explore a database by queries, and answer a question, or make a change, in SQL."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from kuberoll_workers.environments.builtin.config import EnvironmentConfig, parse_config
from kuberoll_workers.environments.builtin.question_process import LimitExceeded, QuestionProcess
from kuberoll_workers.environments.builtin.responses import last_block
from kuberoll_workers.environments.builtin.sqlite import tasks
from kuberoll_workers.environments.builtin.turn import Turn, TurnEnvironment, count_of, first_tagged, mean
from kuberoll_workers.environments.interface import Episode, Metadata, ScoringCase, UnusableRow

STOP_STRINGS = ("</sql>", "</answer>")
REFERENCE_KEYS = ("query", "SQL", "sql", "ground_truth")
_TAGS = ("sql", "answer")
_MEMORY = 3 << 29
_MOST_TROUBLES = 10_000
_CELL = 200
_LIMIT = "it takes too much time or memory"

_SCRIPT = "CREATE TABLE t (a INTEGER, b TEXT); INSERT INTO t VALUES (1, 'x'), (2, 'y'), (3, 'y'), (4, NULL);"
# For each kind of score: the row's reference, and turns with their rewards.
_CASES: Mapping[str, list[tuple[str, list[tuple[list[str], float]]]]] = {
    "Result": [
        (
            "SELECT DISTINCT b FROM t WHERE b IS NOT NULL",
            [
                (["<answer>SELECT DISTINCT b FROM t WHERE b IS NOT NULL</answer>"], 1.0),
                (["<answer>SELECT b FROM t WHERE b > '' GROUP BY b ORDER BY b DESC;</answer>"], 1.0),
                (["<sql>SELECT * FROM t</sql>", "<answer>```sql\nSELECT 'y' UNION SELECT 'x'\n```</answer>"], 1.0),
                (["<answer>SELECT b FROM t WHERE b IS NOT NULL</answer>"], 0.0),
                (["<answer>SELECT DISTINCT b FROM t</answer>"], 0.0),
                (["<answer>SELECT DISTINCT b, 1 FROM t WHERE b IS NOT NULL</answer>"], 0.0),
                (["<answer>SELECT 'x'</answer>"], 0.0),
                (["<answer>SELECT DISTINCT c FROM t</answer>"], 0.0),
                (["<answer>x, y</answer>"], 0.0),
                (["<answer></answer>"], 0.0),
                (["SELECT DISTINCT b FROM t WHERE b IS NOT NULL"], 0.0),
            ],
        ),
        (
            "SELECT a FROM t ORDER BY a DESC",
            [
                (["<answer>SELECT a FROM t ORDER BY -a</answer>"], 1.0),
                (["<answer>SELECT a FROM t ORDER BY a</answer>"], 0.0),
            ],
        ),
        (
            "SELECT avg(a) FROM t",
            [
                (["<answer>SELECT sum(a) * 1.0 / count(*) FROM t</answer>"], 1.0),
                (["<answer>SELECT sum(a) / count(*) FROM t</answer>"], 0.0),
                (["<answer>SELECT '2.5'</answer>"], 0.0),
            ],
        ),
    ],
    "State": [
        (
            "DELETE FROM t WHERE a > 2",
            [
                (["<sql>DELETE FROM t WHERE a >= 3</sql>", "<answer>done</answer>"], 1.0),
                (["<sql>DELETE FROM t WHERE a = 3</sql>", "<sql>DELETE FROM t WHERE b IS NULL</sql>",
                  "<answer>done</answer>"], 1.0),
                (["<answer>done</answer>"], 0.0),
                (["<sql>DELETE FROM t</sql>", "<answer>done</answer>"], 0.0),
                (["<sql>DELETE FROM t WHERE a > 2; CREATE TABLE u (a)</sql>", "<answer>done</answer>"], 0.0),
                (["<sql>DELETE FROM t WHERE a > 2; SELECT nothing</sql>", "<answer>done</answer>"], 0.0),
            ],
        ),
    ],
}  # fmt: skip


class SqliteConfig(EnvironmentConfig):
    """The databases, what is scored, and the limits."""

    score: Literal["Result", "State"] = Field(
        default="Result",
        description="Result: the result of the final query is compared with that of the row's query. State: the "
        "database after the policy's statements is compared with the one after the row's.",
    )
    databases: dict[str, str] = Field(
        default_factory=dict, description="SQL scripts of databases by name, for rows with metadata.database."
    )
    max_queries: int = Field(
        default=8, ge=0, le=1000, description="Maximum number of turns without an answer, malformed ones included."
    )
    max_rows: int = Field(default=20, ge=1, le=1000, description="Most rows of a result that the policy sees.")
    max_characters: int = Field(
        default=20_000, ge=16, le=100_000, description="Length of the SQL of one turn; longer ones are refused."
    )
    max_steps: int = Field(
        default=10_000_000,
        ge=1000,
        le=1_000_000_000,
        description="Most steps of SQLite's virtual machine in one turn; ten million take some tenths of a second.",
    )
    cpu_seconds: float = Field(
        default=5.0,
        ge=0.1,
        le=300,
        description="CPU seconds of one turn, for what takes long in a single step. It is answered with an error.",
    )


class SqliteEnvironment(TurnEnvironment):
    """The policy writes `<sql>SELECT …</sql>`, gets the result, and ends with `<answer>SELECT …</answer>`.

    The reward is 1 if the answer's query has the result of the row's `metadata.query`: the same rows, equally often, in
    the same order if that query orders them. With `score: State`, `<answer>` ends the episode, and the reward is 1 if
    the database is then as the row's statements make it. The database is made by `metadata.script`, or is the one of
    `config.databases` that `metadata.database` names. It is in memory, and in a process of its own without files; see
    docs/reference/sqlite.md for what statements may do.

    Episode state: `queries` (turns used), `statements` (texts that changed the database, with `score: State`), at the
    end `correct`. The database itself is made anew in each turn.
    """

    row_metadata: ClassVar[Mapping[str, str]] = {
        "query": "or SQL, sql, ground_truth: the reference, one query or, with score State, statements",
        "script": "SQL script that makes the database",
        "database": "instead of script, the name of one of config.databases",
        "queries": "turns used so far, 0 if absent",
    }

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """
        Raises:
            UnusableEnvironment: The config is invalid; the message names the key.
        """
        self._config = parse_config(SqliteConfig, config)
        self._process = QuestionProcess(
            "kuberoll_workers.environments.builtin.sqlite.database",
            cpu_seconds=self._config.cpu_seconds,
            memory=_MEMORY,
            confined=True,
        )
        # Each reference is tried once; scripts are too long to be keys.
        self._troubles: dict[bytes, str | None] = {}

    def scoring_cases(self) -> list[ScoringCase]:
        """Cases of this kind of score, as far as an episode may be as long."""
        return [
            ScoringCase(row={"metadata": {"script": _SCRIPT, "query": query}}, responses=responses, reward=reward)
            for query, cases in _CASES[self._config.score]
            for responses, reward in cases
            if len(responses) <= self._config.max_queries
        ]

    def check_row(self, metadata: Metadata) -> None:
        """Check that the script and the reference run within the limits.

        Raises:
            UnusableRow: They do not.
        """
        state = metadata or {}
        self._database_of(state)
        count_of(state, "queries")
        _statements_of(state)

    def turn(self, reply: str, state: dict[str, Any]) -> Turn:
        """See `TurnEnvironment.turn`."""
        question = self._database_of(state)
        made, statements = count_of(state, "queries"), _statements_of(state)
        question["statements"] = statements
        tagged = first_tagged(reply, _TAGS)
        if tagged is not None and tagged.name == "answer":
            return self._graded(_unfenced(tagged.body), question, {**state, "queries": made})
        queries = made + 1
        if made >= self._config.max_queries:
            return Turn(
                "\n<error>no answer was given</error>\n",
                metadata={**state, "queries": queries, "correct": False},
                terminated=True,
            )
        shown, wrote = self._result(None if tagged is None else _unfenced(tagged.body), question)
        if wrote and tagged is not None:
            statements = [*statements, _unfenced(tagged.body)]
        if queries == self._config.max_queries:
            shown += "No queries are left: write the answer.\n"
        kept = {**state, "queries": queries, **({"statements": statements} if statements else {})}
        return Turn(f"\n{shown}", metadata=kept, stop_strings=STOP_STRINGS)

    def _graded(self, answer: str, question: dict[str, Any], state: dict[str, Any]) -> Turn:
        error = self._too_long(answer)
        try:
            found = {} if error else self._process.reply({**question, "do": "score", "sql": answer})
        except LimitExceeded:
            found = {}
            error = _LIMIT
        correct = bool(found.get("correct"))
        error = error or found.get("refused")
        return Turn(
            "\nCorrect.\n" if correct else f"\nWrong{f': {error}' if error else ''}.\n",
            metadata={**state, "correct": correct},
            reward=1.0 if correct else 0.0,
            terminated=True,
            answer=answer if self._config.score == "Result" and not self._too_long(answer) else None,
        )

    def _result(self, sql: str | None, question: dict[str, Any]) -> tuple[str, bool]:
        """What the policy sees of a turn's SQL, and whether it changed the database."""
        if sql is None:
            return "<error>write <sql>SELECT ...</sql> or <answer>...</answer></error>\n", False
        if error := self._too_long(sql):
            return f"<error>{error}</error>\n", False
        try:
            found = self._process.reply({**question, "do": "run", "sql": sql})
        except LimitExceeded:
            return f"<error>{_LIMIT}</error>\n", False
        if "refused" in found:
            return f"<error>{found['refused']}</error>\n", False
        lines = [" | ".join(row) for row in ([found["columns"], *found["rows"]] if found["columns"] else [])]
        count = f"the first {len(found['rows'])} rows; there are more" if found["more"] else _rows(len(found["rows"]))
        lines.append(f"({count})" if found["columns"] else "(done)")
        return "<result>\n" + "".join(f"{line}\n" for line in lines) + "</result>\n", found["wrote"]

    def _too_long(self, sql: str) -> str | None:
        most = self._config.max_characters
        return f"the SQL is longer than {most} characters" if len(sql) > most else None

    def _database_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The part of a question that the row gives.

        Raises:
            UnusableRow: The row has no database or reference, or they do not run.
        """
        key = next((key for key in REFERENCE_KEYS if state.get(key) is not None), REFERENCE_KEYS[0])
        reference = state.get(key)
        if not isinstance(reference, str) or not reference.strip():
            raise UnusableRow(f"metadata.{key}: found {str(reference)[:80]!r}; it must be the SQL of the reference")
        script = self._script(state)
        digest = hashlib.sha256(f"{len(script)} {script}{reference}".encode("utf-8", "replace")).digest()
        if digest not in self._troubles:
            if len(self._troubles) >= _MOST_TROUBLES:
                self._troubles.clear()
            self._troubles[digest] = self._trouble(script, reference)
        if (trouble := self._troubles[digest]) is not None:
            field = "script" if trouble.startswith("the script") else key
            raise UnusableRow(f"metadata.{field}: {trouble}")
        return self._question(script, reference)

    def _script(self, state: Mapping[str, Any]) -> str:
        script, name = state.get("script"), state.get("database")
        if script is None and name is not None:
            if name not in self._config.databases:
                known = ", ".join(sorted(self._config.databases)) or "empty"
                raise UnusableRow(f"metadata.database: found {name!r}; config.databases has no such script: {known}")
            return self._config.databases[name]
        if not isinstance(script, str):
            raise UnusableRow(
                f"metadata.script: found {str(script)[:80]!r}; it must be the SQL script that makes the database, or "
                "metadata.database must name one of config.databases"
            )
        return script

    def _question(self, script: str, reference: str) -> dict[str, Any]:
        return {
            "script": script,
            "reference": reference,
            "statements": [],
            "writable": self._config.score == "State",
            "steps": self._config.max_steps,
            "rows": self._config.max_rows,
            "cell": _CELL,
        }

    def _trouble(self, script: str, reference: str) -> str | None:
        """Why a script or a reference is unusable; None if they are not."""
        try:
            found: str | None = self._process.reply({**self._question(script, reference), "do": "check"}).get(
                "unusable"
            )
        except LimitExceeded:
            found = f"the script or the reference cannot be run: {_LIMIT}"
        raised = found is not None and ("too many steps" in found or _LIMIT in found)
        return f"{found}; raise config.maxSteps and config.cpuSeconds, or leave the row out" if raised else found

    def solution(self, episode: Episode) -> list[str]:
        """The reference itself."""
        state = episode.metadata or {}
        reference = next(str(state[key]) for key in REFERENCE_KEYS if state.get(key) is not None)
        if self._config.score == "State":
            return [f"<sql>{reference}</sql>", "<answer>done</answer>"]
        return [f"<answer>{reference}</answer>"]

    def attacks(self, episode: Episode) -> dict[str, list[str]]:  # noqa: ARG002 - the same for all rows
        """Answers that have nothing to do with the question, and statements that reach behind the tables."""
        behind = "PRAGMA writable_schema=ON; DELETE FROM sqlite_master; ATTACH ':memory:' AS other;"
        end = "done" if self._config.score == "State" else "SELECT 987654321"
        return {
            "done at once": ["<answer>done</answer>"],
            "an empty answer": ["<answer></answer>"],
            "an unrelated query": ["<answer>SELECT 987654321</answer>"],
            "statements behind the tables": [f"<sql>{behind}</sql>", f"<answer>{end}</answer>"],
            "an error as answer": ["<answer>SELECT * FROM no_such_table</answer>"],
        }

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Add `accuracy`, and, if any answer was correct, `mean_queries_of_correct`."""
        states = [state or {} for state in batch["extra_env_info"]]
        queries = [state["queries"] for state in states if state.get("correct")]
        metrics = {
            "episodes": len(states),
            "accuracy": len(queries) / len(states) if states else None,
            "mean_queries_of_correct": mean(queries),
        }
        return batch, {name: value for name, value in metrics.items() if value is not None}

    def generate_dataset(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Rows with questions about, or changes of, small databases; a longer dataset starts with the shorter one."""
        draw = random.Random(seed)
        return [self._row(index, draw) for index in range(count)]

    def _row(self, index: int, draw: random.Random) -> dict[str, Any]:
        script = tasks.shop(draw)
        changes = self._config.score == "State"
        text, query = (tasks.change if changes else tasks.question)(draw)
        end = (
            "When the database is as it should be, write <answer>done</answer>."
            if changes
            else "When you know the query whose result is the answer, write it, as in <answer>SELECT 1</answer>."
        )
        prompt = (
            f"A database of SQLite has these tables:\n{tasks.SCHEMA}{text}\n"
            "Each turn, write SQL, as in <sql>SELECT * FROM customer</sql>; you get its result. "
            f"{end} You have {self._config.max_queries} turns before it.\n"
        )
        return {
            "messages": [{"role": "user", "content": prompt}],
            "metadata": {"script": script, "query": query, "queries": 0},
            "stop_strings": list(STOP_STRINGS),
            "idx": index,
        }

    def shutdown(self) -> None:
        """End the process of the databases."""
        self._process.close()


def _rows(count: int) -> str:
    return f"{count} {'row' if count == 1 else 'rows'}"


def _unfenced(body: str) -> str:
    """The SQL of a tag, which may be in a block of code."""
    block = last_block(body)
    return body if block is None else block.strip()


def _statements_of(state: Mapping[str, Any]) -> Sequence[str]:
    found = state.get("statements", [])
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise UnusableRow(f"metadata.statements: found {str(found)[:80]!r}; it must be a list of SQL texts, or absent")
    return found
