"""`FigureBound`: a figure with a bound, as people write it: `itl_p99 > 50ms`."""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Literal, NamedTuple, TypeAlias, get_args

from stepscope.recordings.figures.table import FIGURES, FigureSpec, FigureUnit

Relation: TypeAlias = Literal[">=", "<=", ">", "<", "="]

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?|\.[0-9]+")
_SUFFIX = re.compile(r"[A-Za-z%/]*")
# Unit of a figure -> suffix that may follow a number -> factor to convert it to the unit.
_SUFFIXES: dict[FigureUnit, dict[str, float]] = {
    "ms": {"ms": 1.0, "s": 1000.0, "us": 0.001, "": 1.0},
    "s": {"s": 1.0, "ms": 0.001, "": 1.0},
    "share": {"%": 0.01, "": 1.0},
    "tokens/s": {"": 1.0, "tokens/s": 1.0, "/s": 1.0},
    "/s": {"": 1.0, "/s": 1.0},
    "/min": {"": 1.0, "/min": 1.0},
    "": {"": 1.0},
}


class BoundError(Exception):
    """The text of a bound is invalid."""

    def __init__(self, text: str, place: int, problem: str) -> None:
        super().__init__(f"{text!r}, at character {place + 1}: {problem}")
        self.place = place  # index of the offending character, from 0


class FigureBound(NamedTuple):
    figure: FigureSpec
    relation: Relation
    value: float  # in the unit of the figure
    end: int  # index of the character after the bound in the text, where other parsers may continue

    def holds(self, measured: float) -> bool:
        """Whether a measured value makes the bound true: `itl_p99 > 50ms` holds for 60."""
        if self.relation == ">":
            return measured > self.value
        if self.relation == "<":
            return measured < self.value
        if self.relation == ">=":
            return measured >= self.value
        if self.relation == "<=":
            return measured <= self.value
        return measured == self.value


def parse_bound(
    text: str, *, is_whole: bool = True, figures: Mapping[str, FigureSpec] = FIGURES
) -> FigureBound:
    """Read `itl_p99 > 50ms`, `itl_p99=50ms`, `goodput < 95%`, `ttft_p95 >= 1.5s`, `preemptions=0`.

    A latency without a unit is in milliseconds; a share is 0.95 or 95%.

    Args:
        is_whole: whether nothing may follow the bound.

    Raises BoundError: the text is invalid; the message names the position and what was expected.
    """
    place = _skip(text, 0)
    word = _WORD.match(text, place)
    if word is None:
        raise BoundError(text, place, "expected the name of a figure, like itl_p99")
    figure = figures.get(word.group())
    if figure is None:
        near = get_close_matches(word.group(), figures, n=3) or ["itl_p99", "goodput"]
        raise BoundError(
            text, place, f"no figure is called {word.group()}; there is {', '.join(near)}"
        )
    place = _skip(text, word.end())
    relation = next((each for each in get_args(Relation) if text.startswith(each, place)), None)
    if relation is None:
        raise BoundError(text, place, "expected one of > >= < <= =")
    place = _skip(text, place + len(relation))
    value, end = parse_value(text, place, figure)
    rest = _skip(text, end)
    if is_whole and rest < len(text):
        raise BoundError(text, rest, f"nothing may follow the value, got {text[rest:]!r}")
    return FigureBound(figure, relation, value, end)


def parse_value(text: str, place: int, figure: FigureSpec) -> tuple[float, int]:
    """Read a number with an optional unit, from the value of a bound.

    Returns (the value in the figure's unit, index of the character after it)

    Raises BoundError: there is no number, or the figure cannot have this unit.
    """
    number = _NUMBER.match(text, place)
    if number is None:
        raise BoundError(text, place, "expected a number")
    suffixes = _SUFFIXES[figure.unit]
    at = number.end()
    suffix = _SUFFIX.match(text, _skip(text, at))
    assert suffix is not None  # it also matches the empty string
    if suffix.group() in suffixes and suffix.group():
        return float(number.group()) * suffixes[suffix.group()], suffix.end()
    if suffix.group() and suffix.start() == at:
        known = " or ".join(each for each in suffixes if each) or "no unit"
        raise BoundError(text, at, f"{figure.name} takes {known}, got {suffix.group()}")
    value = float(number.group())
    if figure.unit == "share" and value > 1:
        raise BoundError(
            text, place, f"{figure.name} is a share: write {value:g}% or a number up to 1"
        )
    return value, at


def value_text(figure: FigureSpec, value: float | None) -> str:
    """Return a figure's value as shown to people; a dash for None."""
    if value is None:
        return "—"
    if figure.unit == "share":
        return f"{value * 100:.4g} %"
    if figure.unit == "" and value == round(value):
        return f"{value:,.0f}"
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{number} {figure.unit}".replace(" /", "/").strip()


def _skip(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place
