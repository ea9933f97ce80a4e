"""Changes knobs on all tensor-parallel ranks at once, by SGLang's own broadcast.

Every rank has its own scheduler, and all must decide alike. So we never set a knob only on the
rank that we are attached to. Instead, the change is broadcast as a request, with the other requests
of the next loop iteration. Every rank applies the change before the batch of that iteration.
"""

from collections.abc import Callable, Mapping
from typing import Any

CHUNK = "chunked_prefill_size"
SEATS = "pp_max_micro_batch_size"
_MARK = "stepscope"


class ChangeRequests:
    """Builds SGLang requests that carry new knob values.

    Raises:
        ImportError: this SGLang has no `SetInternalStateReq`.
    """

    def __init__(self) -> None:
        from sglang.srt.managers.io_struct import SetInternalStateReq

        self._kind = SetInternalStateReq

    def make(self, values: Mapping[str, int]) -> Any:
        return self._kind(server_args={_MARK: 1, **values})


def around_change(change: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Handle a request to change state, in place of SGLang's `Scheduler.set_internal_state`.

    A request of ours sets knobs on this rank. Any other request goes to SGLang's method, `change`.

    Returns:
        SGLang's answer. None for our own requests, because no client of SGLang waits for an answer.
    """
    values = request.server_args
    if _MARK not in values:
        return change(scheduler, request)
    if CHUNK in values:
        scheduler.chunked_prefill_size = int(values[CHUNK])
    if SEATS in values:
        change(scheduler, type(request)(server_args={SEATS: int(values[SEATS])}))
    return None
