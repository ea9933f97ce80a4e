"""Changes knobs on all tensor-parallel ranks at once, by SGLang's own broadcast.

Every rank has its own scheduler, and all must decide alike. So we never set a knob only on the
rank that we are attached to. Instead, the change is broadcast as a request, with the other requests
of the next loop iteration. Every rank applies the change before the batch of that iteration.
"""

from collections.abc import Callable, Mapping
from typing import Any

from stepscope.engine.protocol.wire import KnobValue

CHUNK = "chunked_prefill_size"
SEATS = "pp_max_micro_batch_size"
LIVE = {"max_num_batched_tokens": CHUNK, "max_num_seqs": SEATS}
"""Knobs that can be changed while SGLang runs, and SGLang's names for them."""
_MARK = "stepscope"


class KnobRequests:
    """Builds SGLang requests that carry new knob values, for `drain` to return.

    Args:
        start: the values at SGLang's start.

    Raises:
        ImportError: this SGLang has no `SetInternalStateReq`.
    """

    def __init__(self, start: Mapping[str, KnobValue]) -> None:
        from sglang.srt.managers.io_struct import SetInternalStateReq

        self._kind = SetInternalStateReq
        self._start = start
        self._changed: set[str] = set()
        self._to_send: list[Any] = []

    def write(self, values: Mapping[str, KnobValue]) -> None:
        """Set knobs on all ranks, from the next batch on."""
        self._changed |= values.keys()
        theirs = {LIVE[name]: value for name, value in values.items()}
        self._to_send.append(self._kind(server_args={_MARK: 1, **theirs}))

    def restore(self) -> None:
        """Restore the values at SGLang's start."""
        if self._changed:
            self.write({name: self._start[name] for name in self._changed})

    def drain(self) -> list[Any]:
        """Return the requests that were built since the last call."""
        requests, self._to_send = self._to_send, []
        return requests


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
