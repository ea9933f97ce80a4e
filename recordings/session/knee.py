"""`Knee`: from how many tokens on a step is bound by compute.

A step of few tokens takes as long as one of a single token, because it reads all weights. The time
of a large step is proportional to its tokens. At the knee the two lines meet: a smaller token
budget wastes the device, a larger one only makes steps longer. The bench, the lab and the dashboard
find it here.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from stepscope.recordings.session.regression import fit_relative
from stepscope.recordings.session.steps import StepTable
from stepscope.recordings.state.lazy_numpy import Floats, Ints, np

Columns: TypeAlias = dict[str, Ints]
Numbers: TypeAlias = Sequence[float] | Floats

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
    num_tokens: Numbers, seconds: Numbers, *others: Numbers, is_mixed: Numbers | None = None
) -> Knee | None:
    """Fit the time of steps as a convex curve over their tokens, of straight pieces.

    Args:
        num_tokens, seconds: of each step; all above zero.
        others: other numbers of each step that its time grows with, such as tokens attended to.
        is_mixed: 1 for steps with prompts, if the others may take less without any token: whole
            CUDA graphs run decodes only. A token budget is for steps with prompts.

    Returns:
        The knee; None unless the curve fits, three steps have at most a quarter of its tokens, and
        three twice as many.
    """
    tokens = np.asarray(num_tokens, dtype=np.float64)
    if len(tokens) < _MIN_STEPS:
        return None
    # The last piece reaches from a quarter of the largest step on, so that it rests on many steps.
    bends = 2.0 ** np.unique(np.floor(np.log2(tokens)))
    bends = np.append(0.0, bends[bends <= tokens.max() / 4])
    pieces = np.maximum(0.0, tokens[:, None] - bends)
    more = [] if is_mixed is None else [is_mixed]
    terms = np.column_stack([np.ones(len(tokens)), *more, pieces, *others])
    found = fit_relative(terms, seconds)
    num_fixed = 1 + len(more)
    flat_s, token_s = sum(found[:num_fixed]), sum(found[num_fixed : num_fixed + len(bends)])
    error = np.median(abs(terms @ found / np.asarray(seconds) - 1))
    if flat_s <= 0 or token_s <= 0 or error > _MOST_ERROR:
        return None
    knee = Knee(flat_s * 1e3, 1 / token_s)
    sizes = np.sort(tokens)
    return knee if 4 * sizes[2] <= knee.tokens <= sizes[-3] / 2 else None


# Of a session

_NEWEST = 16_384  # steps that are looked at
_OF_A_SIZE = 32  # steps that are fitted, of those with about as many tokens
_MIN_SIZES = 4  # of steps with prompts, to tell their fixed cost from that of their tokens
_MOST_APART = 1.5  # factor by which the knees in one half of them and in the other may differ
_NAMES = (
    "num_steps", "num_prefill_tokens", "num_decode_tokens", "num_padded_tokens", "num_attended",
    "kv_used", "device_ns", "launch_ns", "schedule_end_ns", "schedule_start_ns", "tokens_ns",
)  # fmt: skip


def newest_columns(steps: StepTable, last_step: int | None = None) -> Columns:
    """A copy of what `knee_of` needs of the newest steps, up to one (None: all)."""
    end = len(steps) if last_step is None else steps.num_before(last_step + 1)
    begin = max(0, end - _NEWEST)
    return {name: np.array(steps.column(name)[begin:end], dtype=np.int64) for name in _NAMES}


def knee_of(of: Columns) -> Knee | None:
    """The knee of an engine by steps of its session; None if they do not show it.

    Attention and the KV blocks in use are terms of their own, so that long contexts do not count
    as tokens. Of steps of about the same size, those with the shortest contexts are fitted. The
    time of a step is that of the device, or else from the launch of the model to the tokens.
    """
    start_ns = np.where(of["schedule_end_ns"] >= 0, of["schedule_end_ns"], of["schedule_start_ns"])
    start_ns = np.where(of["launch_ns"] >= 0, of["launch_ns"], start_ns)
    took_ns = np.where(of["device_ns"] > 0, of["device_ns"], of["tokens_ns"] - start_ns)
    num_tokens = of["num_prefill_tokens"] + of["num_decode_tokens"]
    is_known = (of["num_steps"] == 1) & (of["num_attended"] >= 0) & (of["kv_used"] >= 0)
    is_known &= of["num_padded_tokens"] <= 0  # of a static batch, which only some engines compute
    known = np.flatnonzero(is_known & (took_ns > 0) & (num_tokens > 0))
    tokens, prefilled, attended, used = (
        column[known].astype(float)
        for column in (num_tokens, of["num_prefill_tokens"], of["num_attended"], of["kv_used"])
    )
    # A chunk counts there as attended to by all of it; each token attends to those before it.
    attended -= np.minimum(attended, prefilled * prefilled) / 2
    sizes = np.floor(2 * np.log2(tokens)) + (prefilled > 0) / 4
    order = np.lexsort((-known, attended / tokens, sizes))  # of equal contexts the newest first
    _, firsts, counts = np.unique(sizes[order], return_index=True, return_counts=True)
    order = order[np.arange(len(order)) - np.repeat(firsts, counts) < _OF_A_SIZE]
    columns = tokens, took_ns[known] / 1e9, attended, used
    has_graphs = (of["device_ns"] > 0).any()  # of a GPU: decodes alone run in one as a whole
    is_mixed = (prefilled > 0).astype(float) if has_graphs else None
    if has_graphs and len(np.unique(np.floor(2 * np.log2(tokens[prefilled > 0])))) < _MIN_SIZES:
        return None
    parts = order[::2], order[1::2], order
    *halves, whole = (
        find_knee(
            *(each[part] for each in columns), is_mixed=None if is_mixed is None else is_mixed[part]
        )
        for part in parts
    )
    halved = [0.0 if each is None else each.tokens for each in halves]
    return whole if 0 < max(halved) <= _MOST_APART * min(halved) else None
