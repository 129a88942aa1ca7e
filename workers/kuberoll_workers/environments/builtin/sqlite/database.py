"""Databases for statements that a policy wrote. Imported only by the process that runs them (`question_server`).

What a statement may do is decided by SQLite's authorizer, how much by its limits, its heap limit and a count of the
virtual machine's steps. The process itself has no files and is killed when it exceeds its memory or CPU time.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kuberoll_workers.environments.builtin.sqlite.comparison import Expected, Row, same_rows
from kuberoll_workers.environments.builtin.sqlite.text import clauses_of, statements

HEAP = 256 << 20
"""Limit of SQLite's memory, in bytes."""
MAX_COMPARED_ROWS = 20_000
"""Most rows of a result that is scored."""
_STEPS = 1000
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 200_000,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 100_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 500,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 100,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 100_000,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 100,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 100,
    sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER: 100,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 20,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
_WRITING = {
    sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE, sqlite3.SQLITE_CREATE_TABLE,
    sqlite3.SQLITE_CREATE_INDEX, sqlite3.SQLITE_CREATE_VIEW, sqlite3.SQLITE_CREATE_TRIGGER, sqlite3.SQLITE_DROP_TABLE,
    sqlite3.SQLITE_DROP_INDEX, sqlite3.SQLITE_DROP_VIEW, sqlite3.SQLITE_DROP_TRIGGER, sqlite3.SQLITE_ALTER_TABLE,
    sqlite3.SQLITE_REINDEX,
}  # fmt: skip
_PRAGMAS = {"table_info", "table_xinfo", "table_list", "index_list", "index_info", "index_xinfo", "foreign_key_list"}
# Results must be the same when statements are repeated; the others reach beyond the database.
_FUNCTIONS = {
    "random", "randomblob", "current_timestamp", "current_date", "current_time", "load_extension", "fts3_tokenizer",
}  # fmt: skip
# Virtual tables that show, or change, what is behind the tables.
_TABLES = {"sqlite_dbpage", "dbstat", "sqlite_stmt", "bytecode", "tables_used"}


class Refused(Exception):
    """A statement failed, or is not allowed; the message is for who wrote it."""


class Unusable(Exception):
    """The script or the reference of a row cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Table:
    """Result of a query: names of its columns, and its rows."""

    columns: Sequence[str]
    rows: Sequence[Row]


class Database:
    """A database in memory, made by a script."""

    def __init__(self, script: str, *, steps: int, writable: bool) -> None:
        """
        Args:
            steps: Most steps of SQLite's virtual machine in one text of statements.
            writable: Whether statements may change the database.

        Raises:
            Unusable: The script fails.
        """
        self._connection = sqlite3.connect(":memory:", isolation_level=None, cached_statements=0)
        if image := _image(script):
            self._connection.deserialize(image)
        self._connection.text_factory = _text
        for limit, value in _LIMITS.items():
            self._connection.setlimit(limit, value)
        query_only = f"query_only={int(not writable)}"
        for pragma in (f"hard_heap_limit={HEAP}", "temp_store=MEMORY", "trusted_schema=OFF", query_only):
            self._connection.execute(f"PRAGMA {pragma}")
        self._steps = steps
        self._writable = writable
        self._wrote = False

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def run(self, sql: str, most: int) -> tuple[Table | None, bool]:
        """Run statements: all of them or, if one fails, none.

        Args:
            most: Most rows that are returned, of the last statement that has a result.

        Returns:
            The result, if there is one, and whether a statement may have changed the database.

        Raises:
            Refused: One failed, or is not allowed.
        """
        found = None
        self._wrote = False
        with _refusals(), self._transaction():
            for statement in statements(sql):
                cursor = self._connection.execute(statement)
                if cursor.description is not None:
                    rows = cursor.fetchmany(most)
                    found = Table([column[0] for column in cursor.description], rows)
                    cursor.close()
        return found, self._wrote

    def query(self, sql: str, *, cut: bool = False) -> Table:
        """Result of one query.

        Args:
            cut: Whether a result with too many rows is cut.

        Raises:
            Refused: It failed, is not allowed, is not one query, or has too many rows.
        """
        with _refusals():
            count = len(statements(sql))
        if count != 1:
            raise Refused("one query is needed")
        table, _ = self.run(sql, MAX_COMPARED_ROWS + (not cut))
        if table is None:
            raise Refused("the statement is no query")
        if len(table.rows) > MAX_COMPARED_ROWS:
            raise Refused(f"the result has more than {MAX_COMPARED_ROWS} rows")
        return table

    def contents(self) -> dict[str, tuple[Any, list[Row]]]:
        """What each table and view is, and its rows; and indexes and triggers."""
        connection = self._connection
        found: dict[str, tuple[Any, list[Row]]] = {}
        # A view is a query of who created it.
        with _refusals(), self._transaction():
            master = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master").fetchall()
            for kind, name, table, sql in master:
                quoted = _quoted(name)
                if kind == "trigger":
                    found[f"trigger {name}"] = (" ".join(sql.split()).lower(), [])
                elif kind == "index":
                    if not name.startswith("sqlite_"):
                        columns = connection.execute(f"PRAGMA index_xinfo({quoted})").fetchall()
                        unique = [row[2] for row in connection.execute(f"PRAGMA index_list({_quoted(table)})")]
                        key = tuple((row[2], row[3], row[4]) for row in columns if row[5])
                        found[f"index {table} {key}"] = (sorted(unique), [])
                elif not name.startswith("sqlite_"):
                    columns = connection.execute(f"PRAGMA table_xinfo({quoted})").fetchall()
                    shape = [(row[1].lower(), row[2].upper(), *row[3:]) for row in columns]
                    rows = connection.execute(f"SELECT * FROM {quoted}").fetchmany(MAX_COMPARED_ROWS + 1)
                    if len(rows) > MAX_COMPARED_ROWS:
                        raise Refused(f"the table {name} has more than {MAX_COMPARED_ROWS} rows")
                    found[f"{kind} {name.lower()}"] = (shape, rows)
        return found

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Everything or nothing, under the authorizer and the count of steps."""
        connection = self._connection
        connection.execute("BEGIN")
        connection.set_authorizer(self._authorize)
        connection.set_progress_handler(_budget(self._steps // _STEPS), _STEPS)
        try:
            yield
        except BaseException:
            self._unguarded()
            # A statement that ran out of memory may have rolled back already.
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self._unguarded()
        connection.execute("COMMIT")

    def _unguarded(self) -> None:
        self._connection.set_authorizer(None)
        self._connection.set_progress_handler(None, 0)

    def _authorize(self, action: int, one: str | None, two: str | None, *_: str | None) -> int:
        if action == sqlite3.SQLITE_FUNCTION:
            allowed = (two or "").lower() not in _FUNCTIONS
        elif action == sqlite3.SQLITE_PRAGMA:
            allowed = (one or "").lower() in _PRAGMAS
        elif action in _READING:
            allowed = action != sqlite3.SQLITE_READ or (one or "").lower() not in _TABLES
        elif (action, one) == (sqlite3.SQLITE_UPDATE, "sqlite_master"):
            # Asked for where a query uses a table-valued function; SQLite itself refuses statements that do this.
            allowed = True
        else:
            allowed = self._writable and action in _WRITING and (one or "").lower() not in _TABLES
            self._wrote = True
        return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """Reply to a question about a database: `{"unusable": message}` if the row is at fault.

    `question["do"]`:
        `run`: run `sql`; the reply has `columns` and `rows` (texts), `more`, `wrote`, or `refused`.
        `check`: check the script and the reference; the reply is empty.
        `score`: compare `sql`, or the state of the database, with the reference; the reply has `correct`.
    """
    try:
        return _REPLIES[question["do"]](question)
    except Unusable as error:
        return {"unusable": str(error)}


def _run(question: Mapping[str, Any]) -> dict[str, Any]:
    most = question["rows"]
    with _database(question) as database:
        try:
            table, wrote = database.run(question["sql"], most + 1)
        except Refused as error:
            return {"refused": str(error)}
    if table is None:
        return {"columns": [], "rows": [], "more": False, "wrote": wrote}
    rows = [[_shown(value, question["cell"]) for value in row] for row in table.rows[:most]]
    columns = [_shown(name, question["cell"]) for name in table.columns]
    return {"columns": columns, "rows": rows, "more": len(table.rows) > most, "wrote": wrote}


def _check(question: Mapping[str, Any]) -> dict[str, Any]:
    # Scored twice within the limits, the reference leaves time for an answer that takes longer than itself.
    for _ in range(2):
        repeated = {"statements": [question["reference"]]} if question["writable"] else {"sql": question["reference"]}
        if not _score({**question, **repeated})["correct"]:
            raise Unusable("the reference has another result each time")
    return {}


def _score(question: Mapping[str, Any]) -> dict[str, Any]:
    if question["writable"]:
        state = _reference_state(question)
        try:
            with _database(question) as database:
                return {"correct": _same_state(database.contents(), state)}
        except Refused as error:
            return {"correct": False, "refused": str(error)}
    expected = _expected(question)
    try:
        with _database(question) as database:
            table = database.query(question["sql"])
    except Refused as error:
        return {"correct": False, "refused": str(error)}
    return {"correct": expected.allows(table.rows)}


_REPLIES: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {"run": _run, "check": _check, "score": _score}


def _expected(question: Mapping[str, Any]) -> Expected:
    """The result of the reference query."""
    reference = question["reference"]
    with _fresh(question) as database:
        try:
            table = database.query(reference)
        except Refused as error:
            raise Unusable(f"the reference query fails: {error}") from error
        clauses = clauses_of(reference)
        exact = Expected(rows=table.rows, ordered=bool(clauses.order))
        if not clauses.order and not clauses.limited:
            return exact
        places = range(1, len(table.columns) + 1)
        try:
            one, other = (
                database.query(clauses.unlimited(", ".join(f"{place} {way}" for place in places)), cut=True).rows
                for way in ("ASC", "DESC")
            )
            offset = database.query(f"SELECT {clauses.offset}").rows[0][0] if clauses.offset else 0
            found = Expected(rows=table.rows, ordered=exact.ordered, orders=(one, other), offset=max(0, int(offset)))
        except (Refused, TypeError, ValueError):
            # Such as a clause that this reading of it does not understand.
            return exact
        return found if len(one) == len(other) and found.allows(table.rows) else exact


def _reference_state(question: Mapping[str, Any]) -> dict[str, tuple[Any, list[Row]]]:
    with _fresh(question) as database:
        try:
            database.run(question["reference"], 0)
            return database.contents()
        except Refused as error:
            raise Unusable(f"the reference statements fail: {error}") from error


def _same_state(found: Mapping[str, tuple[Any, list[Row]]], expected: Mapping[str, tuple[Any, list[Row]]]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name][0] == shape and same_rows(found[name][1], rows) for name, (shape, rows) in expected.items()
    )


def _fresh(question: Mapping[str, Any]) -> Database:
    return Database(question["script"], steps=question["steps"], writable=question["writable"])


def _database(question: Mapping[str, Any]) -> Database:
    """The database after the statements that have changed it so far."""
    database = _fresh(question)
    for sql in question["statements"]:
        # They succeeded before.
        with contextlib.suppress(Refused):
            database.run(sql, 0)
    return database


@functools.lru_cache(maxsize=16)
def _image(script: str) -> bytes:
    """The database that a script makes, as bytes."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.set_authorizer(_authorize_script)
    try:
        connection.executescript(script)
        if connection.in_transaction:
            connection.execute("COMMIT")
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        # An empty database has no bytes.
        return connection.serialize() if pages else b""
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        raise Unusable(f"the script fails: {error}") from error
    finally:
        connection.close()


def _authorize_script(action: int, *names: str | None) -> int:
    # Made again, the database must be the same.
    chance = action == sqlite3.SQLITE_FUNCTION and (names[1] or "").lower() in ("random", "randomblob")
    denied = chance or action in (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH)
    return sqlite3.SQLITE_DENY if denied else sqlite3.SQLITE_OK


def _budget(calls: int) -> Callable[[], int]:
    """A progress handler that stops a statement after a number of calls."""
    left = iter(range(calls))
    return lambda: int(next(left, None) is None)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise Refused("it needs too much memory") from error
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        raise Refused("it takes too many steps" if str(error) == "interrupted" else str(error)[:500]) from error


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _shown(value: Any, most: int) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        value = f"x'{value[:most].hex()}'"
    # One line for each row.
    text = " ".join(value.split()) if isinstance(value, str) else str(value)
    return text if len(text) <= most else f"{text[:most]}..."
