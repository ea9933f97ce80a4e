"""`find_knee`: from how many tokens on a step is bound by compute.

A step of few tokens takes as long as one of a single token, because it reads all weights. The time
of a large step is proportional to its tokens. At the knee the two lines meet: a smaller token
budget wastes the device, a larger one only makes steps longer. The bench, the lab and the dashboard
find it here.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from stepscope.engine.simulation.regression import fit_relative

if TYPE_CHECKING:
    from stepscope.engine.simulation.regression import Floats

_MIN_STEPS = 7
_MOST_ERROR = 0.2  # median of the relative errors: beyond it, something else decides the times


class Knee(NamedTuple):
    flat_ms: float  # of the smallest steps
    tokens_per_s: float  # added tokens per added second, among the largest steps

    @property
    def tokens(self) -> float:
        return self.flat_ms / 1e3 * self.tokens_per_s

    @property
    def rounded(self) -> int:
        """The tokens for people: two digits."""
        return int(float(f"{self.tokens:.2g}"))


def find_knee(
    num_tokens: "Sequence[float] | Floats",
    seconds: "Sequence[float] | Floats",
    others: "Sequence[Sequence[float] | Floats]" = (),
) -> Knee | None:
    """Fit the time of steps as a convex curve over their tokens, of straight pieces.

    Args:
        num_tokens, seconds: of each step; all above zero.
        others: other numbers of each step that its time grows with, such as tokens attended to.

    Returns:
        The knee; None unless the curve fits, three steps have at most a quarter of its tokens, and
        three twice as many.
    """
    import numpy as np

    tokens = np.asarray(num_tokens, dtype=np.float64)
    if len(tokens) < _MIN_STEPS:
        return None
    # The last piece reaches from a quarter of the largest step on, so that it rests on many steps.
    bends = 2.0 ** np.unique(np.floor(np.log2(tokens)))
    bends = np.append(0.0, bends[bends <= tokens.max() / 4])
    pieces = np.maximum(0.0, tokens[:, None] - bends)
    terms = np.column_stack([np.ones(len(tokens)), pieces, *others])
    found = fit_relative(terms, seconds)
    flat_s, token_s = found[0], sum(found[1 : 1 + len(bends)])
    error = np.median(abs(terms @ found / np.asarray(seconds) - 1))
    if flat_s <= 0 or token_s <= 0 or error > _MOST_ERROR:
        return None
    knee = Knee(flat_s * 1e3, 1 / token_s)
    sizes = np.sort(tokens)
    return knee if 4 * sizes[2] <= knee.tokens <= sizes[-3] / 2 else None
