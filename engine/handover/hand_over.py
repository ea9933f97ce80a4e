"""`HandOver`: hands requests over from a prefill engine once they have their first token.

`EngineRole`: what an engine needs that only prefills or only decodes (`--role`).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from stepscope.engine.handover.decode_link import AwayRequest, DecodeLink
from stepscope.engine.handover.shared_memory import (
    FrameCopier,
    SharedMemoryReceiver,
    SharedMemorySender,
    sweep,
)
from stepscope.engine.loop.client_requests import OtherEngine
from stepscope.engine.loop.core import EngineCore
from stepscope.engine.loop.inbox import Task
from stepscope.engine.protocol.commands import HandedOver, KVTicket
from stepscope.engine.protocol.engine_config import EngineConfig
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.protocol.wire import RequestOrigin
from stepscope.engine.scheduling.kv_memory import free_host_bytes, memory_bytes
from stepscope.engine.scheduling.request import Request, RequestStatus
from stepscope.engine.scheduling.step import KVReceiver, ScheduledRow
from stepscope.engine.transport.endpoints import Endpoint

_LONGEST_REQUESTS = 2  # number of longest requests that `transfer_memory=auto` has room for


@dataclass(eq=False)
class HandOver:
    """Hands requests over to a decode engine, and takes them back if it is lost.

    Use it on the prefill engine's thread. While there is no room to transfer KV blocks, requests
    with their first token wait (`Scheduler.leaving`), and no prompt is admitted. Without a decode
    engine, this engine computes all tokens itself.
    """

    core: EngineCore
    link: DecodeLink
    sender: SharedMemorySender
    seed_of: Callable[[Request], int]
    _away: dict[int, AwayRequest] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.link.start(self, lambda do: self.core.inbox.put(Task(do)))

    @property
    def num_away(self) -> int:
        """Number of unfinished requests in the decode engine. From any thread."""
        return len(self._away)

    def is_away(self, request_id: int) -> bool:
        """Whether the request is in the decode engine. From any thread."""
        return request_id in self._away

    def after_step(self, rows: Sequence[ScheduledRow]) -> None:
        """Hand over the requests that got a token in this step and have not ended."""
        if not self.link.is_open:
            return
        for row in rows:
            request = row.request
            is_going_on = row.samples and request.status is RequestStatus.RUNNING
            if is_going_on and request.may_leave:
                self.core.scheduler.set_aside(request)
        self._empty_leaving()

    def abort(self, request_id: int) -> bool:
        """Abort a request in the decode engine. Returns False if the request is not there."""
        away = self._away.get(request_id)
        if away is None:
            return False
        self.link.abort(away)
        return True

    def close(self) -> None:
        """End all requests in the decode engine, and the link."""
        self.link.close()
        self._away.clear()

    # What the link reports

    def loaded(self, away: AwayRequest) -> None:
        self._free(away)
        self._empty_leaving()

    def ended(self, away: AwayRequest) -> None:
        self._away.pop(away.request.request_id, None)
        self.loaded(away)

    def refused(self, away: AwayRequest) -> None:
        away.request.may_leave = False
        self._take_back(away)
        self._empty_leaving()

    def lost(self, aways: list[AwayRequest]) -> None:
        for away in reversed(aways):  # reversed, because each goes to the front of the queue
            self._take_back(away)
        if not self.link.is_open:
            for request in list(self.core.scheduler.leaving):
                self.core.scheduler.keep_here(request)
            self.core.set_decode_engine(None)

    def opened(self) -> None:
        self.core.set_decode_engine(self.link.engine)
        self._empty_leaving()  # requests wait if the old engine was lost within the same step

    # Back and forth

    def _empty_leaving(self) -> None:
        scheduler = self.core.scheduler
        for request in list(scheduler.leaving):
            sent_ns = time.monotonic_ns()
            num_blocks = scheduler.kv.num_blocks_for(request.num_computed_tokens)
            ticket = self.sender.put(request.block_table[:num_blocks])
            if ticket is None:
                return
            self._send(request, ticket, sent_ns)

    def _send(self, request: Request, ticket: KVTicket, sent_ns: int) -> None:
        assert request.first_token_ns is not None
        assert request.last_token_ns is not None
        handed_over = HandedOver(
            engine=self.core.info.name,
            request_id=request.request_id,
            output_token_ids=request.output_token_ids,
            seed=self.seed_of(request),
            arrival_ns=request.arrival_ns,
            first_token_ns=request.first_token_ns,
            last_token_ns=request.last_token_ns,
            sent_ns=sent_ns,
            kv=ticket,
        )
        client, submit = self.core.client_requests.release(request.request_id)
        away = AwayRequest(request, client, submit, handed_over, ticket)
        self._away[request.request_id] = away
        self.core.scheduler.hand_over(request, self.link.engine)
        self.link.send(away)

    def _take_back(self, away: AwayRequest) -> None:
        request = away.request
        if self._away.pop(request.request_id, None) is None:
            return
        self._free(away)
        if away.is_aborted:
            away.end()
            return
        now_ns = self.core.clock()
        assert request.first_token_ns is not None
        assert request.last_token_ns is not None
        origin = RequestOrigin(
            self.link.engine,
            away.remote_id,
            request.num_output_tokens,
            request.first_token_ns,
            request.last_token_ns,
            sent_ns=None,
            received_ns=now_ns,
        )
        self.core.client_requests.take_back(request, away.client, away.submit, origin)

    def _free(self, away: AwayRequest) -> None:
        if away.ticket is not None:
            self.sender.free(away.ticket)
            away.ticket = None


class EngineRole:
    """The objects that hand requests over. All are None for an engine that does both.

    Connects a prefill engine to its decode engine: make it before loading the model, which takes
    minutes, and close it.

    Raises ConfigError: a prefill engine cannot reach its decode engine.
    """

    def __init__(self, config: EngineConfig, name: str) -> None:
        self.receiver: KVReceiver | None = None  # loads keys and values; only in a decode engine
        # Makes the link to the decode engine; only in a prefill engine.
        self.other_engine: Callable[[EngineCore], OtherEngine] | None = None
        self.name = None if config.role == "both" else config.role
        # Name of the engine to which a prefill engine hands requests over.
        self.decode_engine: str | None = None
        # Identifies the model and its KV shape; None if nothing is handed over.
        self.kv_layout: str | None = None
        self._config = config
        self._link: DecodeLink | None = None
        self._sender: SharedMemorySender | None = None
        sweep()
        if config.role == "prefill":
            self._link = DecodeLink(Endpoint.parse(config.decode_to), name)
            self._link.connect()
            self.decode_engine = self._link.engine

    def load(
        self,
        kv_frames: Callable[[str], FrameCopier],
        max_model_len: int,
        seed_of: Callable[[Request], int],
    ) -> None:
        """Make what needs the loaded model. Raises ConfigError for another model or no memory.

        Args:
            kv_frames, max_model_len, seed_of: those of the `ModelRunner`.
        """
        config = self._config
        if self.name is None:
            return
        path = Path(config.model).expanduser()
        # A name for the weights that all engines on this machine would use for them.
        frames = kv_frames(str(path.resolve()) if path.exists() else config.model)
        self.kv_layout = frames.layout
        if self._link is None:
            self.receiver = SharedMemoryReceiver(frames, config.block_size)
            return
        self._link.check_layout(frames.layout)
        least = -(-max_model_len // config.block_size)
        num_frames, size = _LONGEST_REQUESTS * least, config.transfer_memory
        if size != "auto":
            num_frames = memory_bytes("transfer_memory", size) // frames.frame_bytes
        if num_frames < least:
            raise ConfigError(
                "transfer_memory",
                f"transfer_memory={size} does not hold one request of "
                f"max_model_len={max_model_len} tokens, which takes "
                f"{least * frames.frame_bytes / 1e6:,.0f} MB: raise it, or lower max_model_len",
            )
        num_mb, free_mb = num_frames * frames.frame_bytes / 1e6, free_host_bytes() / 1e6
        if num_mb > free_mb:  # allocating it would make the system kill a process
            raise ConfigError(
                "transfer_memory",
                f"{num_mb:,.0f} MB of transfer memory do not fit into the {free_mb:,.0f} MB that "
                "are free: lower transfer_memory or max_model_len",
            )
        self._sender = SharedMemorySender(frames, num_frames)
        self.other_engine = partial(HandOver, link=self._link, sender=self._sender, seed_of=seed_of)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        if self._sender is not None:
            self._sender.close()
