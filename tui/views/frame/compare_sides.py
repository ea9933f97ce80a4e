"""Describes each of two compared runs in words: how much work, and why its late tokens were late.

A "side" is one of the two runs, A or B.
`ComparePage`: the data that the page with a comparison of two runs is drawn from.
"""

from typing import Literal, NamedTuple, TypeAlias

from stepscope.recordings.attribution.causes import WORDS
from stepscope.recordings.compare.columns import Align
from stepscope.recordings.compare.comparison import Comparison, SideWork
from stepscope.recordings.compare.side.points import StepPoint
from stepscope.recordings.compare.side.requests import Pair
from stepscope.recordings.state.session import SIMULATED
from stepscope.tui.views import format as fmt
from stepscope.tui.views.frame.compare_choices import CompareChoice
from stepscope.tui.views.frame.compare_text import percent

SIDES: tuple[Literal["a", "b"], ...] = ("a", "b")
_CAUSES = ((3, 2), (2, 2), (2, 1), (1, 1), (1, 0), (0, 1), (0, 0))  # numbers of causes: ITL, TTFT


def sizes(found: Comparison, width: int) -> str:
    """Return the number of requests and the duration of both runs; empty if there is no room."""
    num_a, num_b = (fmt.count(work.num_requests) for work in found.works)
    both_a, both_b = (_requests(work) for work in found.works)
    a, b = (fmt.span(work.seconds) for work in found.works)
    in_a, in_b = ("" if work.simulated is None else f" {SIMULATED}," for work in found.works)
    texts = (
        f"A{in_a} {both_a} in {a}, B{in_b} {both_b} in {b}",
        f"A {num_a} requests {a}, B {num_b} {b}",
        f"requests {num_a} {a} | {num_b} {b}",
        f"A {num_a}, B {num_b} requests",
    )
    return fmt.first_fitting((*texts, ""), width)


def work_text(work: SideWork) -> str:
    how = "" if work.simulated is None else f"{SIMULATED}, "
    unit = "records" if work.sums_up else "steps"
    return (
        f"{how}{work.num_steps:,} {unit} in {fmt.span(work.seconds)}, "
        f"{_requests(work)}, "
        f"{fmt.count(work.num_in_tokens)} tokens in, {fmt.count(work.num_out_tokens)} out"
    )


def _requests(work: SideWork) -> str:
    if work.num_requests is None:
        return "— requests"
    before = work.num_requests - (work.num_arrived or work.num_requests)
    from_before = f" ({before:,} from before)" if before > 0 else ""
    return fmt.plural(work.num_requests, "request") + from_before


def late(found: Comparison, side: Literal["a", "b"], width: int) -> str:
    """Return how many tokens of one run were late, the total wait, and as many causes as fit."""
    text = ""
    for num_itl, num_ttft in _CAUSES:
        itl = causes_of(found, "ITL", side, num_itl)
        ttft = causes_of(found, "TTFT", side, num_ttft)
        text = f"ITL: {itl}  │  TTFT: {ttft}" if ttft != "none" else f"ITL: {itl}"
        if len(text) <= width:
            break
        text = text.replace(" of waiting", "").replace("  │  ", " │ ")
        if len(text) <= width:
            break
    return text


def causes_of(found: Comparison, kind: str, side: Literal["a", "b"], limit: int = 3) -> str:
    """Return a line on a run's late tokens: how many, the total wait, `limit` main causes."""
    shares = [share for share in found.causes if share.kind == kind]
    total_ns = sum(share.a_ns if side == "a" else share.b_ns for share in shares)
    number = sum(share.num_a if side == "a" else share.num_b for share in shares)
    if not number or not total_ns:
        within = found.figure(f"{kind.lower()}_within_slo")
        known = within.a if side == "a" else within.b
        if known is None:
            return "unknown"
        return "none" if known == 1 else "of unknown cause"
    mine = sorted(shares, key=lambda share: -(share.a_ns if side == "a" else share.b_ns))
    parts = [
        f"{WORDS[share.cause].name} {percent(spent_ns / total_ns)}"
        for share in mine[:limit]
        if (spent_ns := share.a_ns if side == "a" else share.b_ns) >= total_ns / 100
    ]
    late = f"{number:,} late, {total_ns / 1e9:,.1f} s of waiting"
    return f"{late}: {', '.join(parts)}" if parts else late


def bound_of(found: Comparison, kind: str) -> float:
    return found.slo.itl_ms if kind == "ITL" else found.slo.ttft_ms


SideName: TypeAlias = Literal["a", "b"]


class ComparePage(NamedTuple):
    """The data of the comparison page, taken at one moment. Pairs hold run A, then run B.

    Attributes:
        comparison: the result so far; None until some of each run has been read, and while the
            operator has chosen nothing.
        choices: what to compare with, while the operator chooses; else None.
        shares: the share of each run that has been read; None for a run that still grows.
        columns: the columns of the charts of A and B, from left to right; None where a run has no
            step.
        start: the offset of the first column on the common axis.
        selected: index into `comparison.requests.pairs`, or into `choices`.
    """

    names: tuple[str, str]
    comparison: Comparison | None
    choices: list[CompareChoice] | None
    is_reading: bool
    was_cancelled: bool
    shares: tuple[float | None, float | None]
    notes: list[str]
    align: Align
    focus: SideName
    columns: tuple[list[StepPoint | None], list[StepPoint | None]]
    start: int
    width: int
    cursor: int
    cursor_column: int
    points: tuple[StepPoint | None, StepPoint | None]
    selected: int
    pair: Pair | None
