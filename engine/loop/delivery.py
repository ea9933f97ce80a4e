"""`Delivery`: sends new tokens to the clients of the requests. Runs on the engine's thread."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from msgspec import UNSET
from msgspec.structs import replace

from stepscope.engine.loop.inbox import Client
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.replies import Error, Loaded, Output
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.scheduling.step import ScheduledRow, StepResult
from stepscope.engine.telemetry.token_publisher import TokenPublisher

NO_BURSTS: Mapping[int, list[int]] = MappingProxyType({})


class Delivery:
    """Keeps the client and the `Submit` of every unfinished request, and sends the outputs."""

    def __init__(self, scheduler: Scheduler, token_publisher: TokenPublisher | None) -> None:
        self.token_publisher = token_publisher
        self._scheduler = scheduler
        self._clients: dict[int, tuple[Client, Submit]] = {}

    def expect(
        self, request: Request, client: Client, submit: Submit, prompt_text: str | None
    ) -> None:
        """Send the outputs of `request` to `client` from now on."""
        self._clients[request.request_id] = (client, submit)
        if self.token_publisher is not None:
            self.token_publisher.arrived(request, prompt_text)

    def release(self, request_id: int) -> tuple[Client, Submit]:
        """Stop sending outputs of a request that was handed over; return its client and Submit."""
        if self.token_publisher is not None:
            self.token_publisher.ended(request_id)
        return self._clients.pop(request_id)

    def give_back(self, request_id: int) -> None:
        """Tell the prefill engine, if it handed the request over, that this engine stops."""
        client, submit = self._clients[request_id]
        if submit.handed_over is not UNSET:
            client.reply(Error(code="stopped", message="the decode engine was shut down"))

    def note_loaded(self, request: Request) -> None:
        """Tell the prefill engine that this engine has copied a request's keys and values."""
        client, _ = self._clients[request.request_id]
        client.reply(Loaded(request_id=request.request_id))

    def deliver(
        self,
        rows: Sequence[ScheduledRow],
        result: StepResult,
        bursts: Mapping[int, list[int]] = NO_BURSTS,
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

    def abort(self, request_id: int, reason: str) -> bool:
        """End a request and send its client a last Output. False if there is no such request."""
        request = self._scheduler.abort(request_id, reason)
        if request is None:
            return False
        client, submit = self._clients.pop(request.request_id)
        if request.stop_text is not None:
            request.stop_text.finish(armed=False)
        token_ids = [] if submit.stream else request.output_token_ids
        client.reply(replace(output_of(request, token_ids, "abort"), why=reason))
        if self.token_publisher is not None:
            self.token_publisher.ended(request_id)
        return True


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


class OtherEngine(Protocol):
    """The link to the decode engine, as the loop uses it; implemented by `handover.HandOver`."""

    @property
    def num_away(self) -> int:
        """Number of unfinished requests at the decode engine. From any thread."""

    def is_away(self, request_id: int) -> bool:
        """Whether the request is at the decode engine. From any thread."""

    def after_step(self, rows: Sequence[ScheduledRow]) -> None:
        """Hand over the requests that got a token in the step and have not ended."""

    def abort(self, request_id: int) -> bool:
        """End a request at the decode engine. Returns False if the request is not there."""

    def close(self) -> None:
        """End all requests that are at the decode engine."""
