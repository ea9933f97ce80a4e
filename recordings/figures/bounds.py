"""`FigureBound`: a figure with a bound, as people write it: `itl_p99 > 50ms`."""

import operator
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Literal, NamedTuple, TypeAlias, cast

from stepscope.recordings.figures.table import FIGURES, FigureSpec, FigureUnit

Relation: TypeAlias = Literal[">=", "<=", ">", "<", "="]
_HOLDS: dict[Relation, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "=": operator.eq,
}  # fmt: skip

_HEAD = re.compile(r"\s*(\w*)\s*(>=|<=|[><=])?\s*", re.ASCII)
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+")
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
    def __init__(self, text: str, problem: str) -> None:
        super().__init__(f"{text!r}: {problem}")


class FigureBound(NamedTuple):
    figure: FigureSpec
    relation: Relation
    value: float  # in the unit of the figure
    end: int  # index of the character after the bound in the text, where other parsers may continue

    def holds(self, measured: float) -> bool:
        """Whether a measured value makes the bound true: `itl_p99 > 50ms` holds for 60."""
        return _HOLDS[self.relation](measured, self.value)


def parse_bound(
    text: str, *, is_whole: bool = True, figures: Mapping[str, FigureSpec] = FIGURES
) -> FigureBound:
    """Read `itl_p99 > 50ms`, `itl_p99=50ms`, `goodput < 95%`, `ttft_p95 >= 1.5s`, `preemptions=0`.

    A latency without a unit is in milliseconds; a share is 0.95 or 95%.

    Args:
        is_whole: whether nothing may follow the bound.

    Raises BoundError: the text is invalid; the message tells what was expected.
    """
    head = _HEAD.match(text)
    assert head is not None  # it also matches the empty string
    name, relation = head[1], cast(Relation | None, head[2])
    figure = figures.get(name)
    if figure is None:
        near = ", ".join(get_close_matches(name, figures, n=3) or ["itl_p99", "goodput"])
        known = f"no figure is called {name}; there is {near}"
        raise BoundError(text, known if name else "expected the name of a figure, like itl_p99")
    if relation is None:
        raise BoundError(text, f"after {name}, expected one of > >= < <= =")
    number = _NUMBER.match(text, head.end())
    if number is None:
        raise BoundError(text, f"after {relation}, expected a number")
    factors = _SUFFIXES[figure.unit]
    for unit in sorted(factors, key=len, reverse=True):
        found = re.compile(rf"\s*{re.escape(unit)}(?![\w%/])").match(text, number.end())
        if found is not None:
            break
    else:
        units = " or ".join(each for each in factors if each) or "no unit"
        raise BoundError(text, f"{name} takes {units}, got {text[number.end() :].strip()}")
    value = float(number[0]) * factors[unit]
    if figure.unit == "share" and not unit and value > 1:
        raise BoundError(text, f"{name} is a share: write {value:g}% or a number up to 1")
    if is_whole and (rest := text[found.end() :].strip()):
        raise BoundError(text, f"nothing may follow the value, got {rest!r}")
    return FigureBound(figure, relation, value, found.end())


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
