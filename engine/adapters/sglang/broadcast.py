"""Changes of knobs on all tensor-parallel ranks at once, by SGLang's own broadcast.

Every rank has a scheduler of its own, and all must decide alike. So a change is no assignment on
the rank that we are attached to: it goes out as a request with the others of the next turn, and
every rank applies it before that turn's batch.
"""

from collections.abc import Callable, Mapping
from typing import Any

CHUNK = "chunked_prefill_size"
SEATS = "pp_max_micro_batch_size"
_MARK = "stepscope"


class ChangeRequests:
    """Makes requests that carry new values. Raises ImportError where SGLang has none such."""

    def __init__(self) -> None:
        from sglang.srt.managers.io_struct import SetInternalStateReq

        self._kind = SetInternalStateReq

    def make(self, values: Mapping[str, int]) -> Any:
        return self._kind(server_args={_MARK: 1, **values})


def around_change(change: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Around SGLang's `Scheduler.set_internal_state`: sets the values of our requests on this rank.

    Returns:
        SGLang's answer; None for a request of ours, because no client of SGLang waits for one.
    """
    values = request.server_args
    if _MARK not in values:
        return change(scheduler, request)
    if CHUNK in values:
        scheduler.chunked_prefill_size = int(values[CHUNK])
    if SEATS in values:
        change(scheduler, type(request)(server_args={SEATS: int(values[SEATS])}))
    return None
