"""Queries of SQLite: those that are right, near misses, and attacks."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kuberoll_workers.environments import UnusableRow, landlock
from kuberoll_workers.environments.builtin.question_process import LimitExceeded, ProcessFailed, QuestionProcess
from kuberoll_workers.environments.builtin.sqlite.comparison import Expected, same_rows, same_sequence
from kuberoll_workers.environments.builtin.sqlite.environment import SqliteEnvironment
from kuberoll_workers.environments.builtin.sqlite.text import clauses_of, statements
from tests.environments.support import step_one

SCRIPT = """
CREATE TABLE team (id INTEGER PRIMARY KEY, name TEXT, points REAL, city TEXT);
INSERT INTO team VALUES (1, 'Reds', 3.5, 'Oslo'), (2, 'Blues', 3.5, 'Rome'), (3, 'Greens', 1.25, 'Oslo'),
    (4, 'Whites', NULL, NULL), (5, 'Blacks', 0.1, 'Rome'), (6, 'Pinks', 0.2, 'Rome');
CREATE VIEW norse AS SELECT * FROM team WHERE city = 'Oslo';
"""


@pytest.fixture(scope="module")
def results() -> Iterator[SqliteEnvironment]:
    environment = SqliteEnvironment({"maxSteps": 1_000_000, "cpuSeconds": 1.0})
    yield environment
    environment.shutdown()


@pytest.fixture(scope="module")
def states() -> Iterator[SqliteEnvironment]:
    environment = SqliteEnvironment({"score": "State", "maxSteps": 1_000_000, "cpuSeconds": 1.0})
    yield environment
    environment.shutdown()


def seen(environment: SqliteEnvironment, sql: str, metadata: dict[str, Any] | None = None) -> str:
    """What the policy sees of its SQL."""
    row = {"script": SCRIPT, "query": "SELECT 1"} if metadata is None else metadata
    result = step_one(environment, f"<sql>{sql}</sql>", row)
    assert (result.rewards, result.terminateds) == ([0.0], [False])
    text: str = result.observations[0]["content"]
    return text


def reward(environment: SqliteEnvironment, query: str, answer: str, script: str = SCRIPT) -> float:
    result = step_one(environment, f"<answer>{answer}</answer>", {"script": script, "query": query})
    assert result.terminateds == [True]
    found: float = result.rewards[0]
    return found


@pytest.mark.parametrize(
    ("query", "right", "wrong"),
    [
        ("SELECT name FROM team WHERE city = 'Oslo'",
         ["SELECT name FROM norse", "SELECT name FROM team WHERE id IN (1, 3) ORDER BY name;",
          "SELECT 'Reds' UNION SELECT 'Greens'"],
         ["SELECT name FROM team", "SELECT id, name FROM norse", "SELECT name FROM norse LIMIT 1",
          "SELECT name FROM norse UNION ALL SELECT 'Reds'", "SELECT lower(name) FROM norse",
          "SELECT name FROM norse WHERE 0"]),
        ("SELECT DISTINCT city FROM team",
         ["SELECT city FROM team GROUP BY city"],
         ["SELECT city FROM team", "SELECT DISTINCT city FROM team WHERE city IS NOT NULL",
          "SELECT DISTINCT coalesce(city, 'NULL') FROM team"]),
        ("SELECT city, count(*) FROM team GROUP BY city",
         ["SELECT city, sum(1) FROM team GROUP BY 1 ORDER BY 2"],
         ["SELECT city, count(city) FROM team GROUP BY city", "SELECT count(*), city FROM team GROUP BY city",
          "SELECT city, count(*) FROM team WHERE city IS NOT NULL GROUP BY city"]),
        ("SELECT avg(points) FROM team",
         ["SELECT total(points) / count(points) FROM team", "SELECT sum(points) / 5 FROM team"],
         ["SELECT avg(coalesce(points, 0)) FROM team", "SELECT sum(points) FROM team",
          "SELECT round(avg(points), 2) + 0.01 FROM team",
          "SELECT cast(avg(points) AS TEXT) FROM team"]),
        ("SELECT sum(points) FROM team WHERE city = 'Rome'", ["SELECT 0.2 + 0.1 + 3.5"], ["SELECT 3.81"]),
        ("SELECT count(*) FROM team", ["SELECT 6.0"], ["SELECT '6'", "SELECT 5", "SELECT count(points) FROM team"]),
        ("SELECT name FROM team WHERE points IS NOT NULL ORDER BY points DESC, name",
         ["SELECT name FROM team WHERE points >= 0 ORDER BY points DESC, name ASC"],
         ["SELECT name FROM team WHERE points IS NOT NULL",
          "SELECT name FROM team WHERE points IS NOT NULL ORDER BY points",
          "SELECT name FROM team WHERE points >= 0 ORDER BY points DESC, name DESC"]),
        # Reds and Blues tie: either may be first.
        ("SELECT name FROM team ORDER BY points DESC",
         ["SELECT name FROM team ORDER BY points DESC, name", "SELECT name FROM team ORDER BY points DESC, name DESC"],
         ["SELECT name FROM team ORDER BY points", "SELECT name FROM team ORDER BY name"]),
        ("SELECT name FROM team ORDER BY points DESC LIMIT 1",
         ["SELECT 'Reds'", "SELECT name FROM team WHERE points = 3.5 ORDER BY name LIMIT 1"],
         ["SELECT 'Greens'", "SELECT 'Reds' UNION SELECT 'Blues'", "SELECT 'Reds' WHERE 0"]),
        ("SELECT name FROM team ORDER BY points DESC LIMIT 2 OFFSET 1",
         ["SELECT 'Reds' UNION ALL SELECT 'Greens'", "SELECT 'Blues' UNION ALL SELECT 'Greens'"],
         ["SELECT 'Greens' UNION ALL SELECT 'Reds'", "SELECT 'Reds' UNION ALL SELECT 'Blues'"]),
        ("SELECT name FROM team LIMIT 2", ["SELECT name FROM team ORDER BY id DESC LIMIT 2", "SELECT name FROM norse"],
         ["SELECT name FROM team LIMIT 3", "SELECT 'Reds' UNION ALL SELECT 'Reds'", "SELECT 'x' UNION SELECT 'y'"]),
        ("SELECT name FROM team WHERE points > 99", ["SELECT name FROM team WHERE 0"],
         ["SELECT 'Reds'", "SELECT NULL"]),
        ("SELECT 1", ["SELECT 1;", "```sql\nSELECT 1\n```", "SELECT /* one; */ 1 -- one", "VALUES (1)"],
         ["SELECT 1; SELECT 1", "SELECT 1; SELECT 2", "", ";", "1", "SELECT", "INSERT INTO team (id) VALUES (9)",
          "CREATE TABLE x (a)", "SELECT '\ud800'", "SELECT '\x00'",
          "SELECT 1, '" + "x" * 30_000 + "'", "SELECT 1 " + " " * 30_000 + "--"]),
    ],
)  # fmt: skip
def test_known_good_and_known_bad(results: SqliteEnvironment, query: str, right: list[str], wrong: list[str]) -> None:
    assert [answer for answer in [query, *right] if reward(results, query, answer) != 1.0] == []
    assert [answer for answer in wrong if reward(results, query, answer) != 0.0] == []


@pytest.mark.parametrize(
    ("change", "right", "wrong"),
    [
        ("UPDATE team SET points = 0 WHERE points IS NULL",
         [["UPDATE team SET points = coalesce(points, 0)"],
          ["DELETE FROM team WHERE id = 4", "INSERT INTO team VALUES (4, 'Whites', 0, NULL)"]],
         [[], ["UPDATE team SET points = 0"], ["UPDATE team SET points = 0 WHERE id = 5"], ["SELECT 1"]]),
        ("DELETE FROM team WHERE city = 'Rome'",
         [["DELETE FROM team WHERE id IN (2, 5, 6)"], ["DELETE FROM team WHERE id = 2; DELETE FROM team WHERE id > 4"],
          ["DELETE FROM team; SELECT nonsense", "DELETE FROM team WHERE city = 'Rome'"]],
         [["DELETE FROM team WHERE id IN (2, 5)"], ["DELETE FROM team"], ["DROP TABLE team"]]),
        ("CREATE UNIQUE INDEX by_name ON team (name)",
         [["CREATE UNIQUE INDEX other ON team (name)"]],
         [["CREATE INDEX by_name ON team (name)"], ["CREATE UNIQUE INDEX by_name ON team (name, city)"], []]),
        ("ALTER TABLE team ADD COLUMN coach TEXT", [["ALTER TABLE team ADD coach text"]],
         [["ALTER TABLE team ADD COLUMN coach INTEGER"], ["CREATE TABLE coach (a TEXT)"]]),
        ("CREATE TRIGGER t AFTER INSERT ON team BEGIN DELETE FROM team WHERE id = 1; END",
         [["CREATE TRIGGER t  AFTER INSERT ON team BEGIN DELETE FROM team WHERE id = 1; END;"]],
         [["CREATE TRIGGER t AFTER INSERT ON team BEGIN DELETE FROM team WHERE id = 2; END"]]),
    ],
)  # fmt: skip
def test_changes_are_scored_by_the_state(
    states: SqliteEnvironment, change: str, right: list[list[str]], wrong: list[list[str]]
) -> None:
    def total(texts: list[str]) -> float:
        metadata: dict[str, Any] = {"script": SCRIPT, "query": change}
        for sql in texts:
            metadata = step_one(states, f"<sql>{sql}</sql>", metadata).metadata[0]
        found: float = step_one(states, "<answer>done</answer>", metadata).rewards[0]
        return found

    assert [texts for texts in [[change], *right] if total(texts) != 1.0] == []
    assert [texts for texts in wrong if total(texts) != 0.0] == []


def test_a_change_survives_the_process(states: SqliteEnvironment) -> None:
    row = {"script": SCRIPT, "query": "DELETE FROM team WHERE id = 1"}
    changed = step_one(states, "<sql>DELETE FROM team WHERE id = 1</sql>", row).metadata[0]
    assert changed["statements"] == ["DELETE FROM team WHERE id = 1"]
    process = states._process._process
    assert process is not None
    process.kill()
    process.wait()
    other = SqliteEnvironment({"score": "State"})
    try:
        assert "(5 rows)" in seen(other, "SELECT * FROM team", changed)
        assert "(5 rows)" in seen(states, "SELECT * FROM team", changed)
    finally:
        other.shutdown()


ATTACKS = {
    "attach a file": ("ATTACH '{path}' AS other", "not authorized"),
    "attach memory": ("ATTACH ':memory:' AS other", "not authorized"),
    "copy to a file": ("VACUUM INTO '{path}'", "VACUUM"),
    "load a library": ("SELECT load_extension('{path}')", "load_extension"),
    "read a file": ("SELECT readfile('/etc/passwd')", "no such function"),
    "write a file": ("SELECT writefile('{path}', 'x')", "no such function"),
    "temporary directory": ("PRAGMA temp_store_directory = '/tmp'", "not authorized"),
    "raise the limit of memory": ("PRAGMA hard_heap_limit = 0", "not authorized"),
    "write the schema": ("PRAGMA writable_schema = ON", "not authorized"),
    "allow writing": ("PRAGMA query_only = OFF", "not authorized"),
    "change the schema's table": ("UPDATE sqlite_master SET sql = ''", "may not be modified"),
    "a pointer": ("SELECT fts3_tokenizer('simple', x'4141414141414141')", "fts3_tokenizer"),
    "a virtual table": ("CREATE VIRTUAL TABLE v USING fts5(a)", "not authorized"),
    "end the transaction": ("COMMIT; DELETE FROM team", "not authorized"),
    "write": ("DELETE FROM team", "not authorized"),
    "endless recursion": (
        "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT count(*) FROM c", "steps"),
    "cross product": (f"SELECT count(*) FROM {', '.join(f'team t{n}' for n in range(20))}", "steps"),
    "long blob": ("SELECT zeroblob(1000000000)", "too big"),
    "random blob": ("SELECT length(randomblob(1e9))", "randomblob"),
    "long text": ("SELECT replace(hex(zeroblob(90000)), '0', hex(zeroblob(90000)))", "too big"),
    "a step without end": ("SELECT length(printf('%.*c', 2000000000, 'x'))", "too much time or memory"),
    "a sorted flood": (
        "WITH RECURSIVE c(n, x) AS (SELECT 1, zeroblob(190000) UNION ALL SELECT n + 1, zeroblob(190000) FROM c LIMIT "
        "100000) SELECT n, x FROM c ORDER BY substr(hex(n), -1)", "too much memory"),
    "a concatenated flood": (
        "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c LIMIT 1000) "
        "SELECT group_concat(printf('%.900c', 'x')) FROM c", "too big"),
    "many columns": (f"SELECT {', '.join(['1'] * 2000)}", "too many columns"),
    "depth": ("SELECT " + "(" * 5000 + "1" + ")" * 5000, "stack"),
    "a slow pattern": ("SELECT 'aaaa' LIKE '" + "%a" * 2000 + "b'", "too complex"),
    "a long row of unions": (" UNION ALL ".join(["SELECT 1"] * 600), "too many terms"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_attacks_are_answered_with_an_error(results: SqliteEnvironment, tmp_path: Path, name: str) -> None:
    sql, message = ATTACKS[name]
    sql = sql.replace("{path}", str(tmp_path / "file"))
    text = seen(results, sql)
    assert text.startswith("\n<error>")
    assert message in text
    assert not (tmp_path / "file").exists()
    if name != "a step without end":
        assert reward(results, "SELECT count(*) FROM team", sql) == 0.0
    assert seen(results, "SELECT count(*) AS n FROM team") == "\n<result>\nn\n6\n(1 row)\n</result>\n"


@pytest.mark.slow
def test_a_flood_of_rows_is_cut(results: SqliteEnvironment) -> None:
    flood = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT n, printf('%.99999c', 'x') FROM c"
    text = seen(results, flood)
    assert text.endswith("...\n(the first 20 rows; there are more)\n</result>\n")
    assert len(text) < 5000
    assert reward(results, "SELECT 1", f"{flood} LIMIT 30000") == 0.0


def test_a_view_that_never_ends_is_worth_nothing(states: SqliteEnvironment) -> None:
    endless = "CREATE VIEW v AS WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT n FROM c"
    row = {"script": SCRIPT, "query": "CREATE VIEW v AS SELECT 1 AS n"}
    changed = step_one(states, f"<sql>{endless}</sql>", row).metadata[0]
    assert step_one(states, "<answer>done</answer>", changed).rewards == [0.0]


@pytest.mark.parametrize(
    "sql",
    ["CREATE TEMP TABLE x (a)", "ATTACH ':memory:' AS x", "VACUUM", "BEGIN", "INSERT INTO team (id) VALUES (random())"],
)
def test_what_is_not_of_the_database_is_refused_with_writing_too(states: SqliteEnvironment, sql: str) -> None:
    assert seen(states, sql).startswith("\n<error>")


def test_a_policy_can_look_at_the_schema(results: SqliteEnvironment) -> None:
    assert "CREATE TABLE team" in seen(results, "SELECT sql FROM sqlite_master")
    assert "points | REAL" in seen(results, "PRAGMA table_info(team)")
    assert "points" in seen(results, "SELECT name FROM pragma_table_info('team')")
    assert "(2 rows)" in seen(results, "SELECT value FROM json_each('[1, 2]')")


def test_an_oracle_is_right_in_every_generated_row() -> None:
    for score in ("Result", "State"):
        environment = SqliteEnvironment({"score": score})
        try:
            for row in environment.generate_dataset(30, seed=1):
                metadata = row["metadata"]
                environment.check_row(metadata)
                if score == "State":
                    metadata = step_one(environment, f"<sql>{metadata['query']}</sql>", metadata).metadata[0]
                result = step_one(environment, f"<answer>{metadata['query']}</answer>", metadata)
                assert (result.rewards, result.terminateds) == ([1.0], [True])
                lazy = step_one(environment, "<answer>SELECT 'x', 1</answer>", row["metadata"])
                # A change of nothing is right where nothing is to be changed.
                assert lazy.rewards == [0.0] or score == "State"
        finally:
            environment.shutdown()


def test_turns_without_an_answer_are_counted() -> None:
    environment = SqliteEnvironment({"maxQueries": 2, "databases": {"teams": SCRIPT}})
    metadata: dict[str, Any] = {"database": "teams", "query": "SELECT 1"}
    try:
        first = step_one(environment, "what now?", metadata)
        assert first.observations[0]["content"].startswith("\n<error>write <sql>")
        second = step_one(environment, "<sql>SELECT city FROM team WHERE id > 3</sql>", first.metadata[0])
        assert second.observations[0]["content"] == (
            "\n<result>\ncity\nNULL\nRome\nRome\n(3 rows)\n</result>\nNo queries are left: write the answer.\n"
        )
        third = step_one(environment, "<sql>SELECT 1</sql>", second.metadata[0])
        assert (third.rewards, third.terminateds, third.metadata[0]["correct"]) == ([0.0], [True], False)
        answered = step_one(environment, "<answer>SELECT 1</answer>", second.metadata[0])
        assert (answered.rewards, answered.terminateds) == ([1.0], [True])
    finally:
        environment.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"script": SCRIPT}, "metadata.query: found 'None'"),
        ({"script": SCRIPT, "SQL": 7}, "metadata.SQL: found '7'"),
        ({"query": "SELECT 1"}, "metadata.script: found 'None'"),
        ({"query": "SELECT 1", "database": "x"}, "metadata.database: found 'x'"),
        ({"query": "SELECT 1", "script": "CREATE TABEL x"}, "metadata.script: the script fails: near"),
        ({"query": "SELECT 1", "script": "ATTACH '/etc/passwd' AS x"}, "the script fails: not authorized"),
        ({"query": "SELECT 1", "script": "SELECT random()"}, "metadata.script: the script fails"),
        ({"query": "SELECT x FROM team", "script": SCRIPT}, "metadata.query: .*: no such column: x"),
        ({"sql": "SELECT 1; SELECT 2", "script": SCRIPT}, "metadata.sql: .*: one query is needed"),
        ({"query": "DELETE FROM team", "script": SCRIPT}, "metadata.query: the reference query fails: not authorized"),
        ({"query": "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n FROM c) SELECT count(*) FROM c", "script": ""},
         "too many steps; raise config.maxSteps"),
        ({"query": "SELECT length(printf('%.*c', 2000000000, 'x'))", "script": ""},
         "raise config.maxSteps and config.cpuSeconds"),
        ({"query": "SELECT 1", "script": "", "queries": -1}, "metadata.queries"),
        ({"query": "SELECT 1", "script": "", "statements": "x"}, "metadata.statements"),
    ],
)  # fmt: skip
def test_unusable_rows_are_named(metadata: dict[str, Any], message: str) -> None:
    environment = SqliteEnvironment({"cpuSeconds": 0.5})
    try:
        with pytest.raises(UnusableRow, match=message):
            environment.check_row(metadata)
    finally:
        environment.shutdown()


VALUES = st.none() | st.integers(0, 2) | st.sampled_from(["a", "b"]) | st.sampled_from([0.5, 1.0])
ROWS = st.lists(st.tuples(VALUES, VALUES), max_size=6)


@given(ROWS, st.randoms(use_true_random=False))
def test_order_counts_only_where_it_is_asked_for(rows: list[tuple[Any, ...]], draw: random.Random) -> None:
    shuffled = draw.sample(rows, len(rows))
    assert same_rows(rows, shuffled)
    assert Expected(rows=rows).allows(shuffled)
    assert Expected(rows=rows, ordered=True).allows(shuffled) == same_sequence(shuffled, rows)
    if rows:
        assert not same_rows(rows, rows[1:])
        assert not same_rows([*rows[1:], ("c", "c")], rows)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=8), st.integers(0, 4), st.integers(0, 8),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_rows_that_tie_may_be_in_any_order(
    rows: list[tuple[int, int]], offset: int, limit: int, draw: random.Random
) -> None:
    one = sorted(rows)
    other = sorted(rows, key=lambda row: (row[0], -row[1]))
    window = slice(offset, offset + limit)
    expected = Expected(rows=one[window], ordered=True, orders=(one, other), offset=offset)
    shuffled = draw.sample(rows, len(rows))
    assert expected.allows(sorted(shuffled, key=lambda row: row[0])[window])
    # Other orders are right only as far as rows tie.
    found = shuffled[window]
    assert expected.allows(found) == ([row[0] for row in found] == [row[0] for row in one[window]])


@pytest.mark.parametrize(
    ("sql", "found"),
    [
        ("SELECT 1", ["SELECT 1"]),
        (" SELECT 1 ; ; SELECT ';' ; -- ;", ["SELECT 1 ;", "SELECT ';' ;"]),
        ("SELECT \"a;b\", `c;d`, [e;f] /* ; */", ["SELECT \"a;b\", `c;d`, [e;f] /* ; */"]),
        ("CREATE TRIGGER t AFTER INSERT ON x BEGIN SELECT 1; END; SELECT 2",
         ["CREATE TRIGGER t AFTER INSERT ON x BEGIN SELECT 1; END;", "SELECT 2"]),
        ("SELECT 'open; ", ["SELECT 'open;"]),
        ("/* open ; ", []),
        ("", []),
    ],
)  # fmt: skip
def test_statements(sql: str, found: list[str]) -> None:
    assert statements(sql) == found


@pytest.mark.parametrize(
    ("query", "order", "limited", "offset"),
    [
        ("SELECT a FROM t ORDER BY a", "a", False, ""),
        ("select a from t order -- by\n by a, (b) limit 1;", "a, (b)", True, ""),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a LIMIT 1)", "", False, ""),
        ("SELECT rank() OVER (ORDER BY a) FROM t LIMIT 3 OFFSET 1 + 1", "", True, "1 + 1"),
        ("SELECT a, b FROM t LIMIT 2, 3", "", True, "2"),
        ("SELECT 'ORDER BY a' FROM t -- ORDER BY a", "", False, ""),
        ("SELECT 1 UNION SELECT 2 ORDER BY 1", "1", False, ""),
    ],
)
def test_the_outermost_clauses_count(query: str, order: str, limited: bool, offset: str) -> None:
    found = clauses_of(query)
    assert (found.order, found.limited, found.offset) == (order, limited, offset)


@given(
    st.lists(st.sampled_from(["'", '"', ";", "--", "\n", "/*", "*/", "[", "]", "`", "a", " "]), max_size=12).map(
        "".join
    )
)
def test_no_text_is_cut_within_quotes(sql: str) -> None:
    # What SQLite calls complete has as many statements as there are.
    for statement in statements(sql)[:-1]:
        assert sqlite3.complete_statement(statement)


@pytest.mark.slow
@pytest.mark.skipif(landlock.abi() == 0, reason="the kernel has no Landlock")
def test_the_process_has_no_files(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        "import os\n"
        "def answer(path):\n"
        "    try:\n"
        "        os.open(path, os.O_RDONLY)\n"
        "    except PermissionError:\n"
        "        return 'refused'\n"
        "    return 'open'\n"
    )
    (tmp_path / "secret").write_text("x")
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(tmp_path)
        for confined, expected in ((True, "refused"), (False, "open")):
            with QuestionProcess("module", confined=confined) as process:
                assert process.reply(str(tmp_path / "secret")) == expected


def test_a_question_beyond_its_limits_or_an_error_is_no_reply(tmp_path: Path) -> None:
    (tmp_path / "asked.py").write_text(
        "def answer(question):\n"
        "    if question == 'memory':\n"
        "        return len(bytearray(1 << 40))\n"
        "    while question == 'time':\n"
        "        pass\n"
        "    return 1 / question\n"
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(tmp_path)
        with QuestionProcess("asked", cpu_seconds=0.2) as process:
            for question in ("memory", "time"):
                with pytest.raises(LimitExceeded):
                    process.reply(question)
            with pytest.raises(ProcessFailed, match="ZeroDivisionError"):
                process.reply(0)
            assert process.reply(2) == 0.5
