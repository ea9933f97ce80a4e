"""`NewRequests`: turns prompts that were tokenised and checked into queued requests.

Runs on the engine's thread.
"""

from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET

from stepscope.engine.loop.delivery import Delivery
from stepscope.engine.loop.inbox import Client
from stepscope.engine.protocol.commands import HandedOver, Submit
from stepscope.engine.protocol.wire import Arrived, Rejected, RequestOrigin
from stepscope.engine.scheduling.block_pool import BlockHash
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.text.stop_strings import StopText


class NewRequests:
    """Numbers requests, queues them, and adds each arrival to the next step record."""

    def __init__(
        self,
        scheduler: Scheduler,
        delivery: Delivery,
        clock: Callable[[], int],
        eos_token_ids: frozenset[int],
    ) -> None:
        self.next_request_id = 0
        self._scheduler = scheduler
        self._delivery = delivery
        self._clock = clock
        self._eos_token_ids = eos_token_ids

    def add(
        self,
        submit: Submit,
        token_ids: list[int],
        client: Client,
        stop_text: StopText | None = None,
        prompt_text: str | None = None,
        arrival_ns: int | None = None,
        block_hashes: Sequence[BlockHash] = (),
    ) -> Request:
        """Queue a request for a prompt that was tokenised and checked.

        Args:
            arrival_ns: when it arrived; None: now.
            block_hashes: hashes of its KV blocks, from a simulation that makes up the tokens.
        """
        request = Request(
            request_id=self._new_request_id(),
            prompt_token_ids=token_ids,
            sampling=submit.sampling,
            arrival_ns=self._clock() if arrival_ns is None else arrival_ns,
            client_id=submit.client_id,
            priority=submit.priority,
            eos_token_ids=self._eos_token_ids,
            stop_text=stop_text,
            block_hashes=list(block_hashes),
        )
        if submit.handed_over is not UNSET:
            _go_on(request, submit.handed_over)
        self._begin(request, client, submit, prompt_text)
        self._scheduler.add(request)
        return request

    def take_back(
        self, request: Request, client: Client, submit: Submit, origin: RequestOrigin
    ) -> None:
        """Queue a request that came back from the decode engine, in front of all others."""
        request.origin = origin
        self._begin(request, client, submit, None)
        self._scheduler.take_back(request)

    def _begin(
        self, request: Request, client: Client, submit: Submit, prompt_text: str | None
    ) -> None:
        self._delivery.expect(request, client, submit, prompt_text)
        publishes_tokens = self._delivery.token_publisher is not None
        prefix_hashes = self._scheduler.prefix_hashes
        self._scheduler.unpublished_events.append(
            Arrived(
                request_id=request.request_id,
                client_id=request.client_id,
                num_prompt_tokens=request.num_prompt_tokens,
                max_tokens=request.sampling.max_tokens,
                priority=request.priority,
                time_ns=request.arrival_ns,
                prompt_token_ids=request.prompt_token_ids if publishes_tokens else None,
                prompt_text=prompt_text,
                prefix_hashes=None if prefix_hashes is None else prefix_hashes.of_prompt(request),
                origin=request.origin,
            )
        )

    def refuse(self, client_id: str, reason: str) -> None:
        """Add to the next step record that a request was refused."""
        self._scheduler.unpublished_events.append(
            Rejected(request_id=self._new_request_id(), client_id=client_id, reason=reason)
        )

    def _new_request_id(self) -> int:
        self.next_request_id += 1
        return self.next_request_id - 1


def _go_on(request: Request, handed_over: HandedOver) -> None:
    output = handed_over.output_token_ids
    received_ns, request.arrival_ns = request.arrival_ns, handed_over.arrival_ns
    request.first_token_ns = handed_over.first_token_ns
    request.last_token_ns = handed_over.last_token_ns
    request.sampling = msgspec.structs.replace(request.sampling, seed=handed_over.seed)
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
    for token_id in output:
        request.token_ids.append(token_id)
        request.finish_reason_after(token_id)
    if request.stop_text is not None:
        request.stop_text.take()  # the client has this text already
