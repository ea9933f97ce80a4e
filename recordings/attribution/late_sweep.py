"""`Breach`: a step with late tokens; `worst_of_seconds`: those with the longest waits.

Late tokens come in swarms, so one per second is enough for a list from which people jump to steps.
"""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SECOND_NS = 1_000_000_000


class Breach(NamedTuple):
    """A step with tokens later than a bound, and the longest wait for one of these tokens."""

    step: int
    time_ns: int
    kind: str  # TTFT or ITL
    ns: int  # length of the wait without the operator's pauses
    request_id: int
    num_tokens: int = 1  # late tokens of this kind in the step


def worst_of_seconds(
    times_ns: "NDArray[np.int64]", waits_ns: "NDArray[np.int64]"
) -> "NDArray[np.int64]":
    """The places of the longest wait of each second of engine time; of equal ones the first.

    `times_ns`: when the waits ended, in order.
    """
    import numpy as np

    seconds = times_ns // _SECOND_NS
    firsts = np.flatnonzero(np.append(True, seconds[1:] != seconds[:-1])[: len(seconds)])
    second_of = np.repeat(firsts, np.diff(firsts, append=len(seconds)))
    longest = np.zeros_like(waits_ns)
    longest[firsts] = np.maximum.reduceat(waits_ns, firsts) if len(firsts) else 0
    places = np.flatnonzero(waits_ns == longest[second_of])
    return places[np.unique(second_of[places], return_index=True)[1]]
