"""`knee_of`: the knee of an engine, from the steps of a session.

The time of a step is fitted over its tokens, the tokens that its prefill attends to and the KV
blocks in use, so that long contexts count as what they are. Of steps of about the same size, those
with the shortest contexts are taken.
"""

from typing import TYPE_CHECKING, TypeAlias

from stepscope.engine.simulation.knee import Knee, find_knee
from stepscope.recordings.session.steps import StepTable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Columns: TypeAlias = dict[str, NDArray[np.int64]]

_NEWEST = 16_384  # steps that are looked at
_OF_A_SIZE = 32  # steps that are fitted, of those with about as many tokens
_MOST_APART = 1.5  # factor by which the knees in one half of them and in the other may differ
_NAMES = (
    "num_steps", "num_prefill_tokens", "num_decode_tokens", "num_padded_tokens", "num_attended",
    "kv_used", "device_ns", "launch_ns", "schedule_end_ns", "schedule_start_ns", "tokens_ns",
)  # fmt: skip


def newest_columns(steps: StepTable, last_step: int | None = None) -> "Columns":
    """A copy of what `knee_of` needs of the newest steps, up to one (None: all)."""
    import numpy as np

    end = len(steps) if last_step is None else steps.num_before(last_step + 1)
    begin = max(0, end - _NEWEST)
    return {name: np.array(steps.column(name)[begin:end], dtype=np.int64) for name in _NAMES}


def knee_of(of: "Columns") -> Knee | None:
    """The knee; None if the steps do not show it.

    The time of a step is that of the device, or else from the launch of the model to the tokens.
    """
    import numpy as np

    start_ns = np.where(of["schedule_end_ns"] >= 0, of["schedule_end_ns"], of["schedule_start_ns"])
    start_ns = np.where(of["launch_ns"] >= 0, of["launch_ns"], start_ns)
    took_ns = np.where(of["device_ns"] > 0, of["device_ns"], of["tokens_ns"] - start_ns)
    num_tokens = of["num_prefill_tokens"] + of["num_decode_tokens"]
    is_known = (of["num_steps"] == 1) & (of["num_attended"] >= 0) & (of["kv_used"] >= 0)
    is_known &= of["num_padded_tokens"] <= 0  # padding costs time in some engines only
    known = np.flatnonzero(is_known & (took_ns > 0) & (num_tokens > 0))
    tokens, prefilled, attended, used = (
        column[known].astype(float)
        for column in (num_tokens, of["num_prefill_tokens"], of["num_attended"], of["kv_used"])
    )
    # Of a prompt's own tokens each attends to the ones before it: exact for one prompt in the step.
    attended -= np.minimum(attended, prefilled * prefilled) / 2
    sizes = np.floor(2 * np.log2(tokens)) + (prefilled > 0) / 4
    order = np.lexsort((-known, attended / tokens, sizes))  # of equal contexts the newest first
    _, firsts, counts = np.unique(sizes[order], return_index=True, return_counts=True)
    order = order[np.arange(len(order)) - np.repeat(firsts, counts) < _OF_A_SIZE]
    found = []
    for part in (order[::2], order[1::2], order):
        others = (attended[part], used[part])
        knee = find_knee(tokens[part], took_ns[known][part] / 1e9, others)
        if knee is None:
            return None
        found.append(knee)
    one, other, whole = found
    apart = max(one.tokens, other.tokens) / min(one.tokens, other.tokens)
    return whole if apart <= _MOST_APART else None
