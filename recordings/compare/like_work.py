"""Figures of like work: they compare waits in which the engine did the same amount of work.

The load decides how often a decode shares a step with a prefill. The engine and its settings decide
how long the token then takes. So these figures have a winner even if the loads of the runs differ.
"""

from collections.abc import Iterator

from stepscope.recordings.compare.figures import ComparedFigure, judged, without_winner
from stepscope.recordings.compare.load_difference import LoadDifference
from stepscope.recordings.compare.side.slices import (
    GapWork,
    Slice,
    Stratum,
    Stretches,
    in_strata,
)
from stepscope.recordings.compare.statistics.contrast import MIN_COVERED, Contrast

DECODE_ONLY, BESIDE_PREFILL = "ITL decode only", "ITL beside a prefill"
LIKE_STEP = "step, like work"
_RANKS = {50: "p50", 99: "p99"}


def like_work_figures(
    stretches: tuple[Stretches, Stretches], load: LoadDifference
) -> Iterator[ComparedFigure]:
    """Compare ITL and step time among steps of like size.

    ITL is compared apart for waits with and without a prefill, among steps with as many decodes.

    Args:
        stretches: the waits of each run, divided into stretches of time.
    """
    itl_a, itl_b = (each["itl"] for each in stretches)
    decode = _Like(
        DECODE_ONLY,
        in_strata(itl_a, _decode_only),
        in_strata(itl_b, _decode_only),
        is_paired=load.is_same,
    )
    for rank, name in _RANKS.items():
        yield decode.figure(f"like_itl_decode_{name}", f"{DECODE_ONLY} {name}", rank)
    beside = _Like(
        BESIDE_PREFILL,
        in_strata(itl_a, _beside_prefill),
        in_strata(itl_b, _beside_prefill),
        is_paired=load.is_same,
    )
    for rank, name in _RANKS.items():
        figure = beside.figure(f"like_itl_prefill_{name}", f"{BESIDE_PREFILL} {name}", rank)
        # Different prompts make steps of different length.
        if not load.has_like_prompts:
            figure = figure._replace(verdict=without_winner(figure.verdict))
        yield figure
    steps = _Like(LIKE_STEP, *(each["step"] for each in stretches), is_paired=load.is_same)
    yield steps.figure("like_step_p50", LIKE_STEP, 50)


class _Like:
    """The waits of both runs with one kind of work, such as decodes beside a prefill.

    Args:
        what: name of the kind of work.
        is_paired: see `Contrast`.
    """

    def __init__(self, what: str, a: list[Slice], b: list[Slice], *, is_paired: bool) -> None:
        self._what = what
        self._contrast = Contrast(a, b, is_paired=is_paired)
        self._num_a, self._num_b = (sum(each.total() for each in side) for side in (a, b))

    def figure(self, key: str, label: str, rank: int) -> ComparedFigure:
        covered = self._contrast.covered
        effect = self._contrast.percentile(rank) if covered >= MIN_COVERED else None
        if effect is None:
            return ComparedFigure(
                key, label, "ms", None, None, "lower", "unknown", rank=rank, like=self._what,
                covered=covered,
            )  # fmt: skip
        return ComparedFigure(
            key,
            label,
            "ms",
            effect.a_ns / 1e6,
            effect.b_ns / 1e6,
            "lower",
            judged(effect.a_ns, effect.b_ns, "lower", effect.is_sure),
            self._num_a,
            self._num_b,
            rank=rank,
            interval=(effect.low, effect.high),
            like=self._what,
            covered=covered,
        )


def _decode_only(work: Stratum) -> bool:
    return isinstance(work, GapWork) and not work.has_prefill


def _beside_prefill(work: Stratum) -> bool:
    return isinstance(work, GapWork) and work.has_prefill
