"""`HandOver`: hands requests over from a prefill engine once they have their first token."""

import time
from collections.abc import Callable, Sequence

from stepscope.engine.handover.decode_link import AwayRequest, DecodeLink
from stepscope.engine.handover.shared_memory import SharedMemorySender
from stepscope.engine.loop.core import EngineCore
from stepscope.engine.loop.inbox import Task
from stepscope.engine.protocol.commands import HandedOver, KVTicket
from stepscope.engine.protocol.wire import RequestOrigin
from stepscope.engine.scheduling.request import Request, RequestStatus
from stepscope.engine.scheduling.step import ScheduledRow


class HandOver:
    """Hands requests over to a decode engine, and takes them back if it is lost.

    Use it on the prefill engine's thread. While there is no room to transfer KV blocks, requests
    with their first token wait (`Scheduler.leaving`), and no prompt is admitted. Without a decode
    engine, this engine computes all tokens itself.
    """

    def __init__(
        self,
        core: EngineCore,
        link: DecodeLink,
        sender: SharedMemorySender,
        seed_of: Callable[[Request], int],
    ) -> None:
        self._core = core
        self._link = link
        self._sender = sender
        self._seed_of = seed_of
        self._away: dict[int, AwayRequest] = {}
        link.start(self, lambda do: core.inbox.put(Task(do)))

    @property
    def num_away(self) -> int:
        """Number of unfinished requests in the decode engine. May be read from any thread."""
        return len(self._away)

    def is_away(self, request_id: int) -> bool:
        """Whether the request is in the decode engine. May be called from any thread."""
        return request_id in self._away

    def after_step(self, rows: Sequence[ScheduledRow]) -> None:
        """Hand over the requests that got a token in this step and have not ended."""
        if not self._link.is_open:
            return
        for row in rows:
            request = row.request
            if not row.samples or request.status is not RequestStatus.RUNNING:
                continue
            if request.may_leave:
                self._core.scheduler.set_aside(request)
        self._empty_leaving()

    def abort(self, request_id: int) -> bool:
        """Abort a request in the decode engine. Returns False if the request is not there."""
        away = self._away.get(request_id)
        if away is None:
            return False
        self._link.abort(away)
        return True

    def close(self) -> None:
        """End all requests in the decode engine, and the link."""
        self._link.close()
        self._away.clear()

    # What the link reports

    def loaded(self, away: AwayRequest) -> None:
        self._free(away)
        self._empty_leaving()

    def ended(self, away: AwayRequest) -> None:
        self._away.pop(away.request.request_id, None)
        self._free(away)
        self._empty_leaving()

    def refused(self, away: AwayRequest) -> None:
        away.request.may_leave = False
        self._take_back(away)
        self._empty_leaving()

    def lost(self, aways: list[AwayRequest]) -> None:
        for away in reversed(aways):  # reversed, because each goes to the front of the queue
            self._take_back(away)
        if not self._link.is_open:
            for request in list(self._core.scheduler.leaving):
                self._core.scheduler.keep_here(request)
            self._core.set_decode_engine(None)

    def opened(self) -> None:
        self._core.set_decode_engine(self._link.engine)
        self._empty_leaving()  # requests wait if the old engine was lost within the same step

    # Back and forth

    def _empty_leaving(self) -> None:
        scheduler = self._core.scheduler
        for request in list(scheduler.leaving):
            sent_ns = time.monotonic_ns()
            num_blocks = scheduler.kv.num_blocks_for(request.num_computed_tokens)
            ticket = self._sender.put(request.block_table[:num_blocks])
            if ticket is None:
                return
            self._send(request, ticket, sent_ns)

    def _send(self, request: Request, ticket: KVTicket, sent_ns: int) -> None:
        assert request.first_token_ns is not None
        assert request.last_token_ns is not None
        handed_over = HandedOver(
            engine=self._core.info.name,
            request_id=request.request_id,
            output_token_ids=request.output_token_ids,
            seed=self._seed_of(request),
            arrival_ns=request.arrival_ns,
            first_token_ns=request.first_token_ns,
            last_token_ns=request.last_token_ns,
            sent_ns=sent_ns,
            kv=ticket,
        )
        client, submit = self._core.delivery.release(request.request_id)
        away = AwayRequest(request, client, submit, handed_over, ticket)
        self._away[request.request_id] = away
        self._core.scheduler.hand_over(request, self._link.engine)
        self._link.send(away)

    def _take_back(self, away: AwayRequest) -> None:
        request = away.request
        if self._away.pop(request.request_id, None) is None:
            return
        self._free(away)
        if away.is_aborted:
            away.end()
            return
        now_ns = self._core.clock()
        assert request.first_token_ns is not None
        assert request.last_token_ns is not None
        origin = RequestOrigin(
            self._link.engine,
            away.remote_id,
            request.num_output_tokens,
            request.first_token_ns,
            request.last_token_ns,
            sent_ns=None,
            received_ns=now_ns,
        )
        self._core.new_requests.take_back(request, away.client, away.submit, origin)

    def _free(self, away: AwayRequest) -> None:
        if away.ticket is not None:
            self._sender.free(away.ticket)
            away.ticket = None
