"""Figures of like work: waits that were spent on as much, whatever else the engine had to do.

How often a token waits beside a prompt is made by the load; how long it then waits is made by the
engine and its settings. So these have a winner where the load differs, and all others may not.
"""

from collections.abc import Iterator

from stepscope.recordings.compare.effect import MIN_COVERED, NUM_STRETCHES, percentile_effect
from stepscope.recordings.compare.figures import Figure, judged, without_winner
from stepscope.recordings.compare.load import Load
from stepscope.recordings.compare.side import Side
from stepscope.recordings.compare.sliced import GapWork
from stepscope.recordings.compare.slices import Slice, Stratum, num_waits

DECODE_ONLY, BESIDE_PREFILL = "ITL decode only", "ITL beside a prefill"
LIKE_STEP = "step, like work"
_RANKS = {50: "p50", 99: "p99"}


def like_work_figures(a: Side, b: Side, load: Load) -> Iterator[Figure]:
    """Waits for a token with and without a prompt in them, among steps that decode as many; and
    the time of steps that compute as much.
    """
    for rank, name in _RANKS.items():
        yield _figure(
            f"like_itl_decode_{name}_ms", DECODE_ONLY, rank,
            *(side.sliced.itl.grouped(NUM_STRETCHES, _decode_only) for side in (a, b)),
        )  # fmt: skip
    for rank, name in _RANKS.items():
        figure = _figure(
            f"like_itl_prefill_{name}_ms", BESIDE_PREFILL, rank,
            *(side.sliced.itl.grouped(NUM_STRETCHES, _beside_prefill) for side in (a, b)),
        )  # fmt: skip
        # Shorter prompts are computed in shorter steps.
        if not load.has_like_prompts:
            figure = figure._replace(verdict=without_winner(figure.verdict))
        yield figure
    yield _figure(
        "like_step_p50_ms", LIKE_STEP, 50,
        *(side.sliced.step.grouped(NUM_STRETCHES, _as_it_is) for side in (a, b)),
    )  # fmt: skip


def _figure(key: str, like: str, rank: int, a: list[Slice], b: list[Slice]) -> Figure:
    effect = percentile_effect(a, b, rank)
    label = like if like == LIKE_STEP else f"{like} {_RANKS[rank]}"
    if effect is None or effect.covered < MIN_COVERED:
        return Figure(
            key, label, "ms", None, None, "lower", "unknown", rank=rank, like=like,
            covered=0.0 if effect is None else effect.covered,
        )  # fmt: skip
    return Figure(
        key,
        label,
        "ms",
        effect.a_ns / 1e6,
        effect.b_ns / 1e6,
        "lower",
        judged(effect.a_ns, effect.b_ns, "lower", effect.is_sure),
        num_waits(a),
        num_waits(b),
        rank=rank,
        interval=(effect.low, effect.high),
        like=like,
        covered=effect.covered,
    )


def _decode_only(work: Stratum) -> Stratum | None:
    return work if isinstance(work, GapWork) and not work.has_prefill else None


def _beside_prefill(work: Stratum) -> Stratum | None:
    return work if isinstance(work, GapWork) and work.has_prefill else None


def _as_it_is(work: Stratum) -> Stratum | None:
    return work
