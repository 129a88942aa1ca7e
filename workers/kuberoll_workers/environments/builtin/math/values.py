r"""Structure of a mathematical answer: numbers with units, lists, tuples, intervals, relations, words.

Structure is parsed here, because libraries guess: math-verify reads `(1,2)` as an interval, a set or a point as it
suits, drops units, and takes the first number of a text that it cannot parse. The leaves, each an `Expression`, are
left to sympy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from kuberoll_workers.environments.builtin.math.extraction import closing_brace
from kuberoll_workers.environments.builtin.responses import legible

_DEPTH = 12
_MAX_DIGITS = 400
_MAX_EXPONENT = 400
_MAX_ITEMS = 100
_MAX_RELATIONS = 12


@dataclass(frozen=True, slots=True)
class Number:
    """A rational number as it was written.

    Attributes:
        places: Digits after the decimal point; None if not written as a decimal.
        digits: Number of significant digits as written.
    """

    value: Fraction
    places: int | None = None
    digits: int = 0


@dataclass(frozen=True, slots=True)
class Text:
    """Words, in lower case and without punctuation; a single letter keeps its case."""

    words: str


@dataclass(frozen=True, slots=True)
class Expression:
    """LaTeX that only algebra can compare."""

    latex: str


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number or expression with a unit; `%`, `$` and `degree` are units."""

    value: Number | Expression
    unit: str


@dataclass(frozen=True, slots=True)
class Group:
    """Several values.

    Attributes:
        kind: `list` (no brackets, no order), `set` (no order), `tuple` (round brackets, or those of an interval).
        opening, closing: The brackets of a tuple.
        variable: Variable of an interval that was written as an inequality.
    """

    kind: str
    items: tuple[Value, ...]
    opening: str = ""
    closing: str = ""
    variable: str | None = None


@dataclass(frozen=True, slots=True)
class Union:
    """Sets joined by the union sign."""

    parts: tuple[Value, ...]
    variable: str | None = None


@dataclass(frozen=True, slots=True)
class Assignment:
    """A name and its value: `x = 5`, `f(x) = x^2`, `(x, y) = (1, 2)`."""

    name: str
    value: Value


@dataclass(frozen=True, slots=True)
class Relation:
    """An equation or inequality between two expressions; `operator` is one of `=`, `<`, `\\le`, `\\ne`."""

    operator: str
    left: str
    right: str


@dataclass(frozen=True, slots=True)
class Chain:
    """Expressions claimed to be equal, without a leading name: `2 + 3 = 5`."""

    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Based:
    """A number with an explicit base."""

    digits: str
    base: str


@dataclass(frozen=True, slots=True)
class Ratio:
    """Values separated by colons: ratios, and times of day."""

    parts: tuple[Value, ...]
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class Dots:
    """The items that an ellipsis leaves out."""


Value = Number | Text | Expression | Quantity | Group | Union | Assignment | Relation | Chain | Based | Ratio | Dots

DOTS = "…"
"""An ellipsis, however it was written."""

_OPEN, _CLOSE, _DOLLAR = "\ue000", "\ue001", "\ue002"
"""Around words, and for a dollar that is money."""

_LETTERS = {
    "−": "-",
    "–": "-",
    "—": "-",
    "×": "\\times ",
    "·": "\\cdot ",
    "⋅": "\\cdot ",
    "÷": "/",
    "≤": "\\le ",
    "≥": "\\ge ",
    "≠": "\\ne ",
    "≈": "\\approx ",
    "π": "\\pi ",
    "∞": "\\infty ",
    "∪": "\\cup ",
    "∈": "\\in ",
    "°": "^\\circ ",
    "²": "^2",
    "³": "^3",
    "½": "\\frac{1}{2}",
    "¼": "\\frac{1}{4}",
    "¾": "\\frac{3}{4}",
    "±": "\\pm ",
    "∅": "\\emptyset ",
    "ℝ": "\\mathbb{R}",
    "，": ",",
    "％": "%",
    "\u00a0": " ",
    "\u2009": " ",
    "\u202f": " ",
    "*": "\\cdot ",
    _OPEN: "",
    _CLOSE: "",
    _DOLLAR: "",
}
_COMMANDS = {
    **dict.fromkeys(("ldots", "dots", "cdots", "dotsc", "dotsb", "dotsm", "dotso", "hdots"), DOTS),
    "left": "",
    "right": "",
    "displaystyle": "",
    "textstyle": "",
    "limits": "",
    "quad": " ",
    "qquad": " ",
    "dfrac": "\\frac",
    "tfrac": "\\frac",
    "cfrac": "\\frac",
    "leq": "\\le",
    "leqslant": "\\le",
    "geq": "\\ge",
    "geqslant": "\\ge",
    "neq": "\\ne",
    "lt": "<",
    "gt": ">",
    "lbrace": "\\{",
    "rbrace": "\\}",
    "varnothing": "\\emptyset",
    "degree": "^\\circ",
    "colon": ":",
    "div": "/",
    "ast": "\\cdot",
    "simeq": "\\approx",
    "infin": "\\infty",
    "bigl": "",
    "bigr": "",
    "Bigl": "",
    "Bigr": "",
    "big": "",
    "Big": "",
    "mid": "|",
}


def _vocabulary(words: str) -> frozenset[str]:
    return frozenset(words.split())


_STYLES = _vocabulary(
    "text textbf textit textrm texttt textnormal mathrm mathbf mathit mathsf mbox boldsymbol bm emph underline boxed "
    "fbox"
)
_FUNCTIONS = _vocabulary(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp sqrt pi max min gcd lcm deg det theta "
    "alpha beta gamma infty lambda phi mod"
)
_SHORT_WORDS = _vocabulary("no on up ok in if is it of or to he we me us my by at an as am pm do be so")
_UNITS = {
    "cm": "centimeter centimeters centimetre centimetres",
    "m": "meter meters metre metres",
    "km": "kilometer kilometers kilometre kilometres",
    "mm": "millimeter millimeters millimetre millimetres",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard yards",
    "mi": "mile miles",
    "h": "hour hours hr hrs",
    "min": "minute minutes mins",
    "s": "second seconds sec secs",
    "day": "days",
    "week": "weeks",
    "month": "months",
    "year": "years yr yrs",
    "g": "gram grams",
    "kg": "kilogram kilograms",
    "mg": "milligram milligrams",
    "lb": "pound pounds lbs",
    "oz": "ounce ounces",
    "l": "liter liters litre litres",
    "ml": "milliliter milliliters millilitre millilitres",
    "$": "dollar dollars usd",
    "¢": "cent cents",
    "€": "euro euros eur",
    "£": "gbp",
    "degree": "degrees",
    "%": "percent percentage pct",
    "mi/h": "mph",
    "km/h": "kph kmh kmph",
    "unit": "units",
}
_UNIT_OF = {name: unit for unit, names in _UNITS.items() for name in (unit, *names.split())}
_SCALES = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 1000,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
# Words that occur in no unit: a number followed by one of them is not a plain number.
_NO_UNIT = _vocabulary(
    "not no or and if is are was than minus plus times more less least most about between but except wrong incorrect "
    "false true over under least half"
)

_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:(?P<whole>{_INTEGER})(?:\.(?P<places>[0-9]*))?|\.(?P<bare>[0-9]+))"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?) ?{_DECIMAL}"
    r"(?:(?:[eE](?P<e>[-+]?[0-9]{1,6}))"
    r"| ?\\(?:times|cdot) ?10 ?\^ ?(?:(?P<power>[0-9])|\{ ?(?P<exponent>[-+]?[0-9]{1,6}) ?\}))?"
)
_REPEATING = re.compile(
    r"(?P<sign>[-+]?) ?(?P<whole>[0-9]*)\.(?P<places>[0-9]*)\\overline ?\{(?P<period>[0-9]{1,40})\}"
)
_ARGUMENT = r"(?:\{ ?(?P<{0}>[-+]?[0-9]+) ?\}|(?P<{0}1>[0-9]))"
_FRACTION = re.compile(
    r"(?P<sign>[-+]?) ?(?P<whole>[0-9]*) ?\\frac ?"
    + _ARGUMENT.replace("{0}", "top")
    + " ?"
    + _ARGUMENT.replace("{0}", "bottom")
)
_SLASHED = re.compile(r"(?P<sign>[-+]?) ?(?:(?P<whole>[0-9]+) )?(?P<top>[0-9]+) ?/ ?(?P<bottom>-?[0-9]+)")
_LETTER_UNIT = re.compile(r"([-+0-9.,]{1,40}) ([mshgL](?:\^[23])?(?:/[mshgL](?:\^[23])?)?)")
_BASED = re.compile(r"\(?(?P<digits>[0-9A-Za-z]+)\)? ?_ ?(?:(?P<one>[0-9])|\{ ?(?P<base>[0-9]{1,2}) ?\})")
_NAME = re.compile(
    r"(?:\\[A-Za-z]+|[A-Za-z])'{0,3}(?:_(?:\w|\{[\w, ]{1,12}\}))?(?:\^\{?(?:-1|\\prime)\}?)?'{0,3}"
    r"(?: ?\((?:[A-Za-z0-9][, ]{0,2}){1,4}\))?"
)
_NAMES = re.compile(r"\((?: ?[A-Za-z](?:_\w)? ?,){1,4} ?[A-Za-z](?:_\w)? ?\)")
_CHOICE = re.compile(r"\(?([A-Z])\)?[.):]?")
_MARKED_CHOICE = re.compile(r"(?:\(([A-Z])\)|([A-Z])[.):]) ?\S.*", re.DOTALL)
_RELATIONS = ("\\le", "\\ge", "\\ne", "\\in", "\\approx", "=", "<", ">")
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*[A-Za-z]")


def read_value(text: str) -> Value | None:
    """The value that a text states; None if it states none, or several that do not form one value."""
    try:
        return _read(_normalized(legible(text), _DEPTH), _DEPTH)
    except _Unreadable:
        return None


class _Unreadable(Exception):
    pass


# --- one spelling -------------------------------------------------------------------------------------------------


def _normalized(text: str, depth: int) -> str:
    """LaTeX and plain text in one notation, with words and money marked."""
    text = text.replace("**", "^").replace("{,}", ",").replace(",\\!", ",")
    text = re.sub(r"(?<![^\s,;+(\[{])\.{3}(?!\.)", DOTS, text)
    text = "".join(_LETTERS.get(letter, letter) for letter in text)
    text = re.sub(r"√ ?([0-9]+|[a-z])", r"\\sqrt{\1}", text).replace("√", "\\sqrt ")
    text = _without_delimiters(text)
    pieces: list[str] = []
    position = 0
    while position < len(text):
        letter = text[position]
        if letter == "\\":
            piece, position = _command(text, position, depth)
            pieces.append(piece)
        elif letter.isalpha() and letter.isascii():
            piece, position = _bare_word(text, position)
            pieces.append(piece)
        elif letter.isspace() or letter == "~":
            pieces.append(" ")
            position += 1
        else:
            pieces.append(letter)
            position += 1
    joined = re.sub(" {2,}", " ", "".join(pieces)).strip()
    # Adjacent words form one text.
    return re.sub(f"{_CLOSE} ?{_OPEN}", " ", joined)


def _without_delimiters(text: str) -> str:
    text = text.replace("\\$", _DOLLAR)
    if text.count("$") % 2:
        text = re.sub(r"\$(?=[0-9.])", _DOLLAR, text)
    text = text.replace("$", " ")
    for delimiter in ("\\(", "\\)", "\\[", "\\]"):
        text = text.replace(delimiter, " ")
    return text


def _command(text: str, position: int, depth: int) -> tuple[str, int]:
    """Replacement of the command at a position, and the position after it."""
    match = re.compile(r"[A-Za-z]+").match(text, position + 1)
    if match is None:
        letter = text[position + 1 : position + 2]
        end = position + 2
        if letter in ("{", "}", "\\", "|"):
            return f"\\{letter}", end
        if letter in ("%", "#", "&", "_"):
            return letter, end
        return "" if letter == "!" else " ", end
    name, end = match.group(), match.end()
    if name in _STYLES:
        opening = end
        while text[opening : opening + 1] == " ":
            opening += 1
        closing = closing_brace(text, opening) if text[opening : opening + 1] == "{" else None
        if closing is None or depth == 0:
            return "", end
        content = text[opening + 1 : closing - 1]
        if _is_unit(content) and re.search(r"[0-9})] ?$", text[max(0, position - 8) : position].rstrip("\\,; ~")):
            return f"{_OPEN}{content.strip()}{_CLOSE}", closing
        return _styled(name, content, depth - 1), closing
    if name in ("begin", "end"):
        opening = text.find("{", end)
        closing = closing_brace(text, opening) if opening == end else None
        if closing is not None:
            return text[position:closing], closing
    known = _COMMANDS.get(name)
    return (f"\\{name}" if known is None else known), end


def _is_unit(content: str) -> bool:
    names = re.findall("[A-Za-z]+", content)
    return (
        bool(names)
        and all(name.lower() in _UNIT_OF for name in names)
        and not re.search(r"[^A-Za-z0-9/^{} .-]", content)
    )


def _styled(name: str, content: str, depth: int) -> str:
    if name in ("mathrm", "mathbf", "mathit", "mathsf", "boldsymbol", "bm", "boxed", "fbox", "underline"):
        inner = _normalized(content, depth)
        return inner if len(content.strip()) > 1 else content.strip()
    words = content.strip()
    if not re.search("[A-Za-z]", words) or "\\" in words or re.search(r"[0-9=]", words):
        return f" {_normalized(content, depth)} "
    choice = _CHOICE.fullmatch(words)
    if len(words) == 1 or choice is not None:
        return words
    return f" {_OPEN}{words}{_CLOSE} "


def _bare_word(text: str, position: int) -> tuple[str, int]:
    match = _WORD.match(text, position)
    if match is None:
        return text[position], position + 1
    word, end = match.group(), match.end()
    before = text[position - 1 : position]
    after = text[end : end + 1]
    lower = word.lower()
    if word in _FUNCTIONS:
        return f"\\{word} ", end
    if before in ("_", "^"):
        return word, end
    attached = before.isdigit() or before in (")", "}")
    unit = lower in _UNIT_OF
    if re.fullmatch("[eE]", word[:1]) and attached and after.isdigit():
        return word, end
    if unit and (attached or before in (" ", "/")):
        return f"{_OPEN}{word}{_CLOSE}", end
    product = (attached and not unit) or (len(word) == 2 and lower not in _SHORT_WORDS)
    if product or after in ("(", "_", "^"):
        return word, end
    return f"{_OPEN}{word}{_CLOSE}", end


# --- structure ----------------------------------------------------------------------------------------------------


def _read(text: str, depth: int) -> Value:
    text = _trimmed(text)
    if not text or depth == 0:
        raise _Unreadable
    if text == DOTS:
        return Dots()
    for strip in ("\\approx", "="):
        if text.startswith(strip):
            return _read(text[len(strip) :], depth - 1)
    number = _number(text)
    if number is not None:
        return number
    if (time := _ratio(text, depth)) is not None:
        return time
    items = _listed(text)
    if len(items) > 1:
        return _list([_read(item, depth - 1) for item in items])
    if "\\cup" in text:
        parts = _split(text, ("\\cup",))
        if len(parts) > 1:
            variable, parts[0] = _membership(parts[0])
            return Union(tuple(_read(part, depth - 1) for part in parts), variable)
    if (relation := _related(text, depth)) is not None:
        return relation
    if "\\pm" in text and len(_split(text, ("\\pm",))) == 2:
        plus, minus = text.replace("\\pm", "+", 1), text.replace("\\pm", "-", 1)
        return _list([_read(plus, depth - 1), _read(minus, depth - 1)])
    if (group := _bracketed(text, depth)) is not None:
        return group
    return _leaf(text)


def _trimmed(text: str) -> str:
    text = text.strip(" ,;")
    while text.endswith((".", ",", ";", " ", ":")) and not re.search(r"[0-9]\.$", text):
        text = text[:-1]
    return text.strip()


def _list(items: list[Value]) -> Value:
    if len(items) > _MAX_ITEMS:
        raise _Unreadable
    flat: list[Value] = []
    for item in items:
        flat.extend(item.items if isinstance(item, Group) and item.kind == "list" else (item,))
    return Group("list", tuple(flat))


def _split(text: str, separators: tuple[str, ...]) -> list[str]:
    """A text split at separators outside of all brackets and words."""
    parts: list[str] = []
    depth = start = position = 0
    words = False
    while position < len(text):
        letter = text[position]
        if letter in (_OPEN, _CLOSE):
            words = letter == _OPEN
        elif not words:
            if depth <= 0 and (separator := _separator_at(text, position, separators)):
                parts.append(text[start:position])
                position += len(separator)
                start = position
                continue
            if letter == "\\":
                if text[position + 1 : position + 2] in ("{", "}"):
                    depth += 1 if text[position + 1] == "{" else -1
                    position += 2
                    continue
                if text.startswith(("\\begin", "\\end"), position):
                    depth += 1 if text.startswith("\\begin", position) else -1
                name = re.compile(r"[A-Za-z]+|.?").match(text, position + 1)
                position = name.end() if name else position + 1
                continue
            if letter in "([{":
                depth += 1
            elif letter in ")]}":
                depth -= 1
        position += 1
    parts.append(text[start:])
    return parts


def _separator_at(text: str, position: int, separators: tuple[str, ...]) -> str:
    for separator in separators:
        if text.startswith(separator, position):
            end = position + len(separator)
            # \le is not the beginning of \left, and a comma between digits may be a thousands separator.
            if separator[-1].isalpha() and text[end : end + 1].isalpha():
                continue
            if separator == "," and _is_thousands(text, position):
                continue
            return separator
    return ""


def _is_thousands(text: str, comma: int) -> bool:
    after = text[comma + 1 : comma + 5]
    return (
        text[comma - 1 : comma].isdigit()
        and len(after) >= 3
        and after[:3].isdigit()
        and not after[3:4].isdigit()
        and re.search(r"(?:^|[^0-9,])[0-9]{1,3}(?:,[0-9]{3}){0,100}$", text[max(0, comma - 400) : comma]) is not None
    )


def _listed(text: str) -> list[str]:
    """Items of a list without brackets."""
    # "and" and "or" may be part of a text: red and blue.
    text = re.sub(f"{_OPEN} ?(?:and|or) ?{_CLOSE}", ",", text)
    text = re.sub(rf"{_OPEN}(?:and|or) ", f",{_OPEN}", text)
    text = re.sub(rf" (?:and|or){_CLOSE}", f"{_CLOSE},", text)
    text = re.sub(r"(?<= )(?:and|or)(?= )", ",", text)
    if text.startswith(_OPEN) and text.endswith(_CLOSE) and text.count(_OPEN) == 1:
        words = re.split(r",| and | or ", text[1:-1])
        return [f"{_OPEN}{word.strip()}{_CLOSE}" for word in words if word.strip()]
    parts = _split(text, (",", ";"))
    # A comma before "and" leaves an empty item.
    return [part for part in parts if part.strip()]


def _related(text: str, depth: int) -> Value | None:
    parts = _split(text, _RELATIONS)
    if len(parts) - 1 > _MAX_RELATIONS:
        raise _Unreadable
    operators: list[str] = []
    rest = text
    for part in parts[:-1]:
        rest = rest[len(part) :]
        operators.append(next(known for known in _RELATIONS if rest.startswith(known)))
        rest = rest[len(operators[-1]) :]
    parts = [part.strip() for part in parts]
    if not operators:
        return None
    if not all(parts):
        raise _Unreadable
    if set(operators) == {"\\in"} and len(parts) == 2:
        return _with_variable(_read(parts[1], depth - 1), parts[0])
    if set(operators) <= {"=", "\\approx"}:
        if _NAME.fullmatch(parts[0]) or _NAMES.fullmatch(parts[0]):
            return Assignment(re.sub(" ", "", parts[0]), _read(parts[-1], depth - 1))
        if len(parts) == 2 and re.search("[A-Za-z]", _plain(parts[0] + parts[1])):
            return Relation("=", _plain(parts[0]), _plain(parts[1]))
        return Chain(tuple(map(_plain, parts)))
    if operators == ["\\ne"]:
        return Relation("\\ne", _plain(parts[0]), _plain(parts[1]))
    return _inequality(operators, parts, depth)


def _with_variable(value: Value, name: str) -> Value:
    variable = name.strip()
    if isinstance(value, Group):
        return Group(value.kind, value.items, value.opening, value.closing, variable)
    return Union(value.parts, variable) if isinstance(value, Union) else value


def _membership(text: str) -> tuple[str | None, str]:
    parts = _split(text, ("\\in",))
    return (parts[0].strip(), parts[1]) if len(parts) == 2 else (None, text)


def _inequality(operators: list[str], parts: list[str], depth: int) -> Value:
    if not set(operators) <= {"<", ">", "\\le", "\\ge"} or len(parts) > 3:
        raise _Unreadable
    ascending = {"<": True, "\\le": True, ">": False, "\\ge": False}
    strict = {"<", ">"}
    if len({ascending[operator] for operator in operators}) > 1:
        raise _Unreadable
    if not ascending[operators[0]]:
        operators, parts = operators[::-1], parts[::-1]
    name = parts[1] if len(parts) == 3 else next((part for part in parts if _NAME.fullmatch(part)), None)
    if name is not None and _NAME.fullmatch(name):
        low = parts[0] if parts[0] != name else None
        high = parts[-1] if parts[-1] != name else None
        ends = [_read(end, depth - 1) for end in (low, high) if end is not None]
        if not any(isinstance(end, Expression) and re.search("[a-zA-Z]", _plain_letters(end.latex)) for end in ends):
            opening = "(" if low is None or operators[0] in strict else "["
            closing = ")" if high is None or operators[-1] in strict else "]"
            first: Value = Expression("-\\infty") if low is None else _read(low, depth - 1)
            last: Value = Expression("\\infty") if high is None else _read(high, depth - 1)
            return Group("tuple", (first, last), opening, closing, variable=name)
    if len(parts) == 3:
        raise _Unreadable
    return Relation("<" if operators[0] in strict else "\\le", _plain(parts[0]), _plain(parts[1]))


def _plain_letters(latex: str) -> str:
    """Letters of an expression that are variables."""
    return re.sub(r"\\[A-Za-z]+|(?<![A-Za-z])[ei](?![A-Za-z])", "", latex)


def _bracketed(text: str, depth: int) -> Value | None:
    if text in ("\\emptyset", "\\{\\}", "\\{ \\}", "\\{\\emptyset\\}"):
        return Group("set", ())
    if text in ("\\mathbb{R}", "\\mathbb R", "\\R"):
        return Group("tuple", (Expression("-\\infty"), Expression("\\infty")), "(", ")")
    if re.fullmatch(r"\\mathbb ?(?:R|\{R\}) ?(?:\^|_) ?(?:\+|\{ ?(?:\+|> ?0) ?\})", text):
        return Group("tuple", (Number(Fraction(0)), Expression("\\infty")), "(", ")")
    if text.startswith("\\{") and text.endswith("\\}"):
        inner = text[2:-2]
        if _closes_last(text):
            items = _split_all(inner)
            return Group("set", tuple(_read(item, depth - 1) for item in items))
        return None
    if text[:1] not in ("(", "[") or text[-1:] not in (")", "]") or not _closes_last(text):
        return None
    items = _split_all(text[1:-1])
    if len(items) == 1:
        if text[0] != "(" or text[-1] != ")":
            return None
        inner = text[1:-1].strip()
        # A letter in brackets is a choice, words in brackets are words; around anything else the brackets are
        # redundant.
        return Text(inner) if re.fullmatch("[A-Z]", inner) else _read(inner, depth - 1)
    if len(items) > _MAX_ITEMS:
        raise _Unreadable
    return Group("tuple", tuple(_read(item, depth - 1) for item in items), text[0], text[-1])


def _closes_last(text: str) -> bool:
    """True if the first bracket of a text is closed by its last one."""
    depth = 0
    position = 0
    while position < len(text):
        two = text[position : position + 2]
        if two in ("\\{", "\\}"):
            depth += 1 if two == "\\{" else -1
            step = 2
        elif text[position] == "\\":
            step = 2
        else:
            depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(text[position], 0)
            step = 1
        position += step
        if depth == 0:
            return position == len(text)
    return False


def _split_all(text: str) -> list[str]:
    """Items between brackets, where every comma separates."""
    spaced = re.sub(r"(?<=[0-9]),(?=[0-9]{3})", ", ", text)
    return _split(spaced, (",", ";"))


# --- leaves -------------------------------------------------------------------------------------------------------


def _leaf(text: str) -> Value:
    if (unit := _LETTER_UNIT.fullmatch(text)) is not None:
        text = f"{unit[1]} {_OPEN}{unit[2]}{_CLOSE}"
    based = _BASED.fullmatch(text)
    if based is not None and based["digits"][0].isdigit():
        return Based(based["digits"].upper(), based["one"] or based["base"])
    if (quantity := _quantity(text)) is not None:
        return quantity
    if _OPEN in text:
        bare = re.sub(f"{_OPEN}[^{_CLOSE}]*{_CLOSE}", "", text)
        if re.search(r"[-+^=/<>]|\\cdot", bare):
            return Expression(_plain(text))
        return Text(_words(text))
    if (choice := _MARKED_CHOICE.fullmatch(text)) is not None and "," not in text:
        return Text(choice[1] or choice[2])
    if not re.search(r"[0-9A-Za-z]", text):
        raise _Unreadable
    # What an ellipsis stands for is not guessed: only the same spelling is the same.
    return Expression(text.replace(" ", "") if DOTS in text else text)


def _quantity(text: str) -> Value | None:
    """A number or expression with its unit, or an amount of money."""
    money = re.match(rf"([-+]?) ?([{_DOLLAR}€£¥]) ?", text)
    if money is not None:
        value = _bare(money[1] + text[money.end() :].partition(_OPEN)[0].strip())
        if value is None:
            raise _Unreadable
        scale = _SCALES.get(_words(text[money.end() :].partition(_OPEN)[2]), 1)
        return Quantity(_scaled(value, scale), "$" if money[2] == _DOLLAR else money[2])
    if text.endswith(("%", _DOLLAR, "¢", "€", "£")):
        value = _bare(text[:-1].strip())
        return None if value is None else Quantity(value, text[-1].replace(_DOLLAR, "$"))
    if (degrees := re.search(r" ?\^ ?(?:\\circ|\{ ?\\circ ?\})$", text)) is not None:
        value = _bare(text[: degrees.start()])
        return None if value is None else Quantity(value, "degree")
    core, opening, words = text.partition(_OPEN)
    if not opening or not core.strip():
        return None
    value = _bare(core.strip())
    if value is None:
        return None
    names = _words(words).split()
    while names and names[0] in _SCALES:
        value = _scaled(value, _SCALES[names.pop(0)])
    if not names:
        return value
    unit = _unit(" ".join(names))
    return None if unit is None else Quantity(value, unit)


def _bare(text: str) -> Number | Expression | None:
    """The number or expression before a unit."""
    if not re.search(r"[0-9A-Za-z]", text) or re.search(r"[-+/^=<>,(\[{]$", text):
        return None
    return _number(text) or Expression(text)


def _scaled(value: Number | Expression, scale: int) -> Number | Expression:
    if scale == 1:
        return value
    if isinstance(value, Number):
        return Number(value.value * scale)
    return Expression(f"{scale} \\cdot ({value.latex})")


def _unit(words: str) -> str | None:
    """Canonical name of a unit; None if these words are not a unit."""
    names = re.findall(r"[a-z$%¢€£]+|[0-9]|/", words.replace("^", ""))
    if len(names) > 6 or any(name in _NO_UNIT for name in names):
        return None
    power = ""
    unit: list[str] = []
    for name in names:
        if name in ("square", "sq", "squared"):
            power = "2"
        elif name in ("cubic", "cubed"):
            power = "3"
        elif name == "per":
            unit.append("/")
        elif name not in ("of", "the", "a", "an"):
            unit.append(_UNIT_OF.get(name, name[:-1] if len(name) > 3 and name.endswith("s") else name))
    return "".join(unit) + power


def _words(text: str) -> str:
    words = re.sub(f"[{_OPEN}{_CLOSE}\"'`.!?{{}}]", " ", text)
    return " ".join(words.split()).lower()


def _plain(text: str) -> str:
    """An expression without the markers around words."""
    return text.replace(_OPEN, "").replace(_CLOSE, "").strip()


def _ratio(text: str, depth: int) -> Ratio | None:
    if ":" not in text:
        return None
    core, _, words = text.partition(_OPEN)
    parts = core.strip().split(":")
    if len(parts) < 2 or not all(re.fullmatch(r" ?[0-9A-Za-z./]{1,12} ?", part) for part in parts):
        return None
    return Ratio(tuple(_read(part, depth - 1) for part in parts), _words(words).replace(" ", ""))


def _number(text: str) -> Number | None:
    if len(text) > _MAX_DIGITS:
        return None
    for read in (_decimal, _repeating, _fraction):
        if (number := read(text)) is not None:
            return number
    return None


def _decimal(text: str) -> Number | None:
    found = _NUMBER.fullmatch(text)
    if found is None:
        return None
    exponent = int(found["e"] or found["power"] or found["exponent"] or 0)
    if abs(exponent) > _MAX_EXPONENT:
        return None
    whole = re.sub("[, ]", "", found["whole"] or "")
    places = found["places"] or found["bare"] or ""
    value = Fraction(int(whole + places or "0"), 10 ** len(places)) * Fraction(10) ** exponent
    digits = len((whole + places).lstrip("0"))
    return Number(-value if found["sign"] == "-" else value, max(0, len(places) - exponent) or None, digits)


def _repeating(text: str) -> Number | None:
    found = _REPEATING.fullmatch(text)
    if found is None:
        return None
    places, period = found["places"], found["period"]
    value = Fraction(int(found["whole"] + places or "0"), 10 ** len(places)) + Fraction(
        int(period), (10 ** len(period) - 1) * 10 ** len(places)
    )
    return Number(-value if found["sign"] == "-" else value)


def _fraction(text: str) -> Number | None:
    found = _FRACTION.fullmatch(text)
    if found is not None:
        top, bottom = found["top"] or found["top1"], found["bottom"] or found["bottom1"]
    else:
        found = _SLASHED.fullmatch(text)
        if found is None:
            return None
        top, bottom = found["top"], found["bottom"]
    if int(bottom) == 0:
        return None
    whole = found["whole"]
    if whole and (int(top) < 0 or int(bottom) < 0):
        return None
    value = int(whole or 0) + Fraction(int(top), int(bottom))
    return Number(-value if found["sign"] == "-" else value)
