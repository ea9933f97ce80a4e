"""`ClientRequests`: the requests of clients, from their prompt to their last token.

Runs on the engine's thread.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import UNSET
from msgspec.structs import replace

from stepscope.engine.loop.inbox import Call, Client
from stepscope.engine.protocol.commands import HandedOver, Submit
from stepscope.engine.protocol.replies import Error, Loaded, Output
from stepscope.engine.protocol.wire import Arrived, Rejected, RequestOrigin
from stepscope.engine.scheduling.block_pool import BlockHash
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.scheduling.step import ScheduledRow, StepResult
from stepscope.engine.telemetry.token_publisher import TokenPublisher


@dataclass(eq=False)
class ClientRequests:
    """Numbers and queues requests, keeps their clients, and sends them the tokens.

    Each arrival and each refusal is told in the next step record.
    """

    scheduler: Scheduler
    clock: Callable[[], int]
    eos_token_ids: frozenset[int] = frozenset()
    token_publisher: TokenPublisher | None = None
    next_request_id: int = 0
    # Of every unfinished request.
    _clients: dict[int, tuple[Client, Submit]] = field(default_factory=dict)

    # Begin

    def add(self, call: Call, submit: Submit, block_hashes: Sequence[BlockHash] = ()) -> Request:
        """Queue a request for a prompt that was tokenised and checked.

        `block_hashes`: hashes of its KV blocks, from a simulation that makes up the tokens.
        """
        assert call.token_ids is not None, "a Submit is prepared before it is queued"
        has_stop = call.stop_text is not None
        assert has_stop == bool(submit.sampling.stop), "... and its stop strings"
        request = Request(
            request_id=self._new_request_id(),
            prompt_token_ids=call.token_ids,
            sampling=submit.sampling,
            arrival_ns=self.clock() if call.arrival_ns is None else call.arrival_ns,
            client_id=submit.client_id,
            priority=submit.priority,
            eos_token_ids=self.eos_token_ids,
            stop_text=call.stop_text,
            block_hashes=list(block_hashes),
        )
        if submit.handed_over is not UNSET:
            _go_on(request, submit.handed_over)
        self._begin(request, call.client, submit, call.prompt_text)
        self.scheduler.add(request)
        return request

    def take_back(
        self, request: Request, client: Client, submit: Submit, origin: RequestOrigin
    ) -> None:
        """Queue a request that came back from the decode engine, in front of all others."""
        request.origin = origin
        self._begin(request, client, submit, None)
        self.scheduler.take_back(request)

    def _begin(
        self, request: Request, client: Client, submit: Submit, prompt_text: str | None
    ) -> None:
        self._clients[request.request_id] = (client, submit)
        if self.token_publisher is not None:
            self.token_publisher.arrived(request, prompt_text)
        prefix_hashes = self.scheduler.prefix_hashes
        self.scheduler.unpublished_events.append(
            Arrived(
                request_id=request.request_id,
                client_id=request.client_id,
                num_prompt_tokens=request.num_prompt_tokens,
                max_tokens=request.sampling.max_tokens,
                priority=request.priority,
                time_ns=request.arrival_ns,
                prompt_token_ids=request.prompt_token_ids if self.token_publisher else None,
                prompt_text=prompt_text,
                prefix_hashes=None if prefix_hashes is None else prefix_hashes.of_prompt(request),
                origin=request.origin,
            )
        )

    def refuse(self, client_id: str, reason: str) -> None:
        """Add to the next step record that a request was refused."""
        self.scheduler.unpublished_events.append(
            Rejected(request_id=self._new_request_id(), client_id=client_id, reason=reason)
        )

    def _new_request_id(self) -> int:
        self.next_request_id += 1
        return self.next_request_id - 1

    # Go on

    def deliver(
        self, rows: Sequence[ScheduledRow], result: StepResult, bursts: Mapping[int, list[int]]
    ) -> None:
        """Send a step's tokens to the clients, after `Scheduler.update`. `bursts`: by row."""
        now_ns = result.tokens_ns
        for index, (row, token_id) in enumerate(zip(rows, result.token_ids, strict=True)):
            if token_id is None:
                continue
            request = row.request
            if result.logprobs and (logprobs := result.logprobs.get(index)) is not None:
                request.logprobs.append(logprobs)
            if request.first_token_ns is None:
                request.first_token_ns = now_ns
            request.last_token_ns = now_ns
            reason = request.finish_reason
            if reason is not None:
                client, submit = self._clients.pop(request.request_id)
            else:
                client, submit = self._clients[request.request_id]
            if submit.stream or reason is not None:
                token_ids = request.output_token_ids
                if submit.stream:
                    token_ids = bursts.get(index, [token_id])
                client.reply(output_of(request, token_ids, reason))

    def note_loaded(self, request: Request) -> None:
        """Tell the prefill engine that this engine has copied a request's keys and values."""
        client, _ = self._clients[request.request_id]
        client.reply(Loaded(request_id=request.request_id))

    # End

    def abort(self, request_id: int, reason: str) -> bool:
        """End a request and send its client a last Output. False if there is no such request."""
        request = self.scheduler.abort(request_id, reason)
        if request is None:
            return False
        client, submit = self.release(request_id)
        client.reply(replace(aborted(request, submit), why=reason))
        return True

    def release(self, request_id: int) -> tuple[Client, Submit]:
        """Stop sending the outputs of a request; return its client and its `Submit`."""
        if self.token_publisher is not None:
            self.token_publisher.ended(request_id)
        return self._clients.pop(request_id)

    def give_back(self, request_id: int) -> None:
        """Tell the prefill engine, if it handed the request over, that this engine stops."""
        client, submit = self._clients[request_id]
        if submit.handed_over is not UNSET:
            client.reply(Error(code="stopped", message="the decode engine was shut down"))


def output_of(request: Request, token_ids: list[int], finish_reason: str | None) -> Output:
    """Make the `Output` with `token_ids`; it has text only if the request has stop strings."""
    logprobs = None
    if request.sampling.logprobs is not None:
        logprobs, request.logprobs = request.logprobs, []
    return Output(
        request_id=request.request_id,
        token_ids=token_ids,
        text=request.stop_text.take() if request.stop_text is not None else None,
        finish_reason=finish_reason,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_output_tokens=request.num_output_tokens,
        logprobs=logprobs,
        stop=request.stop,
    )


def aborted(request: Request, submit: Submit) -> Output:
    """Make the last `Output` of a request that is ended without another token."""
    if request.stop_text is not None:
        request.stop_text.finish(armed=False)
    return output_of(request, [] if submit.stream else request.output_token_ids, "abort")


def append_output(request: Request, token_ids: Sequence[int]) -> None:
    """Add tokens that another engine has computed to a request and its text."""
    for token_id in token_ids:
        request.token_ids.append(token_id)
        request.finish_reason_after(token_id)


def _go_on(request: Request, handed_over: HandedOver) -> None:
    output = handed_over.output_token_ids
    received_ns, request.arrival_ns = request.arrival_ns, handed_over.arrival_ns
    request.first_token_ns = handed_over.first_token_ns
    request.last_token_ns = handed_over.last_token_ns
    request.sampling = replace(request.sampling, seed=handed_over.seed)
    request.ticket = handed_over.kv
    request.origin = RequestOrigin(
        handed_over.engine,
        handed_over.request_id,
        len(output),
        handed_over.first_token_ns,
        handed_over.last_token_ns,
        handed_over.sent_ns,
        received_ns,
    )
    request.high_water = request.num_prompt_tokens + len(output) - 1
    append_output(request, output)
    if request.stop_text is not None:
        request.stop_text.take()  # the client has this text already


class OtherEngine(Protocol):
    """The link to the decode engine, as the loop uses it; implemented by `handover.HandOver`."""

    @property
    def num_away(self) -> int: ...  # asked from any thread, as the next
    def is_away(self, request_id: int) -> bool: ...
    def after_step(self, rows: Sequence[ScheduledRow]) -> None: ...
    def abort(self, request_id: int) -> bool: ...
    def close(self) -> None: ...
