"""Generated questions about a small shop, with the queries that answer them."""

from __future__ import annotations

import random
from collections.abc import Callable

_CITIES = ("Oslo", "Rome", "Lima", "Cairo", "Kyoto")
_NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ida", "Jon", "Kim", "Lea")
_GOODS = ("apple", "bread", "cheese", "dates", "eggs")

SCHEMA = (
    "CREATE TABLE customer (id INTEGER PRIMARY KEY, name TEXT NOT NULL, city TEXT);\n"
    "CREATE TABLE purchase (id INTEGER PRIMARY KEY, customer_id INTEGER NOT NULL REFERENCES customer (id), "
    "item TEXT NOT NULL, quantity INTEGER NOT NULL, price REAL NOT NULL);\n"
)


def shop(draw: random.Random) -> str:
    """A script that makes a database of the shop."""
    names = draw.sample(_NAMES, draw.randint(5, 10))
    cities = [draw.choice([*_CITIES, None]) for _ in names]
    customers = [
        f"({number}, '{name}', {'NULL' if city is None else repr(city)})"
        for number, (name, city) in enumerate(zip(names, cities, strict=True), start=1)
    ]
    purchases = [
        f"({number}, {draw.randint(1, len(names))}, '{draw.choice(_GOODS)}', {draw.randint(1, 9)}, "
        f"{draw.randint(2, 40) / 4})"
        for number in range(1, draw.randint(12, 30))
    ]
    return (
        f"{SCHEMA}INSERT INTO customer VALUES {', '.join(customers)};\n"
        f"INSERT INTO purchase VALUES {', '.join(purchases)};\n"
    )


Task = tuple[str, str]
"""A question or an order, and the SQL that is right."""


def question(draw: random.Random) -> Task:
    """A question and its query."""
    return draw.choice(_QUESTIONS)(draw)


def change(draw: random.Random) -> Task:
    """A change of the database and its statements."""
    return draw.choice(_CHANGES)(draw)


def _in_city(draw: random.Random) -> Task:
    city = draw.choice(_CITIES)
    return f"How many customers live in {city}?", f"SELECT count(*) FROM customer WHERE city = '{city}'"


def _sold(draw: random.Random) -> Task:
    item = draw.choice(_GOODS)
    return (
        f"How many {item} (total quantity) were bought? Give 0 if none was.",
        f"SELECT coalesce(sum(quantity), 0) FROM purchase WHERE item = '{item}'",
    )


def _without(draw: random.Random) -> Task:
    item = draw.choice(_GOODS)
    return (
        f"What are the names of the customers who never bought {item}?",
        f"SELECT name FROM customer WHERE id NOT IN (SELECT customer_id FROM purchase WHERE item = '{item}')",
    )


def _spent(_: random.Random) -> Task:
    return (
        "How much did each customer who bought something spend? Give name and sum (quantity times price), the largest "
        "sum first.",
        "SELECT c.name, sum(p.quantity * p.price) AS spent FROM customer c JOIN purchase p ON p.customer_id = c.id "
        "GROUP BY c.id ORDER BY spent DESC",
    )


def _cities(draw: random.Random) -> Task:
    item = draw.choice(_GOODS)
    return (
        f"From which known cities, each once, do customers come who bought {item}?",
        "SELECT DISTINCT c.city FROM customer c JOIN purchase p ON p.customer_id = c.id "
        f"WHERE p.item = '{item}' AND c.city IS NOT NULL",
    )


def _average(draw: random.Random) -> Task:
    least = draw.randint(2, 5)
    return (
        f"What is the average price in the purchases of at least {least} pieces? Give each item and its average.",
        f"SELECT item, avg(price) FROM purchase WHERE quantity >= {least} GROUP BY item",
    )


def _raise(draw: random.Random) -> Task:
    item, cents = draw.choice(_GOODS), draw.choice((25, 50, 75))
    return (
        f"Raise the price in every purchase of {item} by 0.{cents}.",
        f"UPDATE purchase SET price = price + 0.{cents} WHERE item = '{item}'",
    )


def _remove(draw: random.Random) -> Task:
    most = draw.randint(1, 4)
    return (
        f"Delete the purchases with a quantity of at most {most}.",
        f"DELETE FROM purchase WHERE quantity <= {most}",
    )


def _move(draw: random.Random) -> Task:
    old, new = draw.sample(_CITIES, 2)
    return (
        f"All customers of {old} have moved to {new}, and those without a city to {old}. Update their cities.",
        f"UPDATE customer SET city = CASE WHEN city = '{old}' THEN '{new}' ELSE '{old}' END "
        f"WHERE city = '{old}' OR city IS NULL",
    )


_QUESTIONS: tuple[Callable[[random.Random], Task], ...] = (_in_city, _sold, _without, _spent, _cities, _average)
_CHANGES: tuple[Callable[[random.Random], Task], ...] = (_raise, _remove, _move)
