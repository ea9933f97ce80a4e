"""`Request`: one prompt, its output so far, and its state in the engine.

The scheduler owns the queues that a request is in. The KV cache manager owns the blocks in its
block table. Both keep the request's state in this object.

With the policy `fcfs`, preempted requests come before all others. With `priority`, the lowest
priority number comes first, then the earliest arrival. No operation of a step walks a queue, and
neither does removal from the middle.
"""

import bisect
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from stepscope.engine.protocol.commands import KVTicket
from stepscope.engine.protocol.knobs import Policy
from stepscope.engine.protocol.replies import PositionLogprobs
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import RequestOrigin
from stepscope.engine.scheduling.block_pool import BlockHash
from stepscope.engine.text.text_stream import StopText


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again, with tokens to recompute
    FINISHED = "finished"


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """One prompt and the tokens it has produced so far."""

    request_id: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrival_ns: int
    client_id: str = ""
    priority: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    stop_text: StopText | None = None  # looks for stop strings; None if there are none

    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(init=False)  # prompt, then output
    max_num_tokens: int = field(init=False)  # prompt and output at most
    end_token_ids: frozenset[int] = field(init=False)  # tokens that may end it
    is_plainly_greedy: bool = field(init=False)  # greedy, no penalties, no min_tokens
    has_penalties: bool = field(init=False)  # its logits depend on earlier tokens by penalties
    draft_token_ids: list[int] = field(default_factory=list)  # guesses that its next row checks
    num_computed_tokens: int = 0  # tokens whose K/V is in the cache
    num_pending_tokens: int = 0  # 1 if a step in flight samples a token; not in `token_ids` yet
    block_table: list[int] = field(default_factory=list)  # block i holds tokens [i*bs, (i+1)*bs)
    block_hashes: list[BlockHash] = field(default_factory=list)  # of the full blocks, chained
    num_hashed_blocks: int = 0  # of block_table, registered in the prefix cache
    num_cached_tokens: int = 0  # of the prompt: its prefix hit at the first admission
    num_preemptions: int = 0
    high_water: int = 0  # most tokens computed before it came back: below it, they are recomputed
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    worst_itl_ns: int = 0  # longest gap between two tokens; only simulated engines need it
    finish_reason: str | None = None
    stop: str | int | None = None  # the stop string or token id that ended it; None for EOS
    logprobs: list[PositionLogprobs] = field(default_factory=list)  # not sent to the client yet
    was_overtaken: bool = False  # by a later one of higher priority, since it waits
    origin: RequestOrigin | None = None  # if it was handed over to this engine, or came back
    may_leave: bool = True  # False: a decode engine has refused it, so it is not handed over
    ticket: KVTicket | None = None  # where its keys and values lie until they are loaded

    def __post_init__(self) -> None:
        sampling = self.sampling
        self.token_ids = list(self.prompt_token_ids)
        self.max_num_tokens = len(self.prompt_token_ids) + sampling.max_tokens
        self.end_token_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self.end_token_ids |= self.eos_token_ids
        self.has_penalties = (
            sampling.repetition_penalty != 1
            or sampling.presence_penalty != 0
            or sampling.frequency_penalty != 0
        )
        self.is_plainly_greedy = (
            sampling.temperature == 0 and not self.has_penalties and sampling.min_tokens == 0
        )

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def is_decoding(self) -> bool:
        """Whether one token is left to compute, its newest, which it got in its present run."""
        num_computed = self.num_computed_tokens
        return (
            num_computed + 1 >= len(self.token_ids)
            and num_computed >= len(self.prompt_token_ids)
            and num_computed > self.high_water
        )

    @property
    def comes_back(self) -> bool:
        """Whether it ran before, here or elsewhere, so that its prompt is counted already."""
        return self.num_preemptions > 0 or self.high_water > 0

    def preempt(self) -> None:
        """Mark the request as preempted: it has lost its blocks and must be recomputed."""
        self.status = RequestStatus.PREEMPTED
        self.high_water = max(self.high_water, self.num_computed_tokens)
        self.num_computed_tokens = 0
        self.draft_token_ids = []
        self.num_preemptions += 1

    def finish_reason_after(self, token_id: int) -> str | None:
        """Return why the request ends with `token_id`, its newest token: "stop", "length" or None.

        Call it at most once for each token, and for every token if there is a `stop_text`. None of
        the first `min_tokens` tokens can end the request, by itself or by completing a stop string.
        """
        sampling = self.sampling
        num_output = self.num_output_tokens
        reason: str | None = None
        if num_output >= sampling.min_tokens and token_id in self.end_token_ids:
            reason = "stop"
            if sampling.ignore_eos or token_id not in self.eos_token_ids:
                self.stop = token_id
        elif num_output >= sampling.max_tokens:
            reason = "length"
        text = self.stop_text
        if text is None:
            return reason
        armed = num_output > sampling.min_tokens
        # The text includes the token that ends the request only with `include_stop`.
        if reason != "stop" or sampling.include_stop:
            text.push(token_id, armed)
        if reason is not None:
            text.finish(armed)
        if text.stop is None:
            return reason
        self.stop = text.stop
        return "stop"


Rank: TypeAlias = tuple[int, int, int]


def rank(request: Request) -> Rank:
    """Return the sort key of the policy `priority`: a lower one is served first, preempted last."""
    return request.priority, request.arrival_ns, request.request_id


def _last_first(request: Request) -> Rank:
    return -request.priority, -request.arrival_ns, -request.request_id


@dataclass(eq=False)
class WaitingQueue:
    """The waiting requests; iterates in the order in which they will be admitted."""

    policy: Policy
    _requests: OrderedDict[int, Request] = field(default_factory=OrderedDict)  # as fcfs serves them
    _ranked: list[Request] = field(default_factory=list)  # under priority, the next one last

    def __len__(self) -> int:
        return len(self._requests)

    def overtake(self, request: Request) -> list[Request]:
        """Mark and return those that came before `request`, which is admitted for its priority."""
        came, priority = (request.arrival_ns, request.request_id), request.priority
        waiting = (each for each in self._requests.values() if each.priority > priority)
        early = [each for each in waiting if (each.arrival_ns, each.request_id) < came]
        found = [each for each in early if not each.was_overtaken]
        for each in found:
            each.was_overtaken = True
        return found

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values()) if self.policy == "fcfs" else reversed(self._ranked)

    def append(self, request: Request) -> None:
        """Add a new request."""
        self._requests[request.request_id] = request
        if self.policy == "priority":
            bisect.insort(self._ranked, request, key=_last_first)

    def prepend(self, request: Request) -> None:
        """Add a preempted request: first under `fcfs`, by its rank under `priority`."""
        self.append(request)
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        """Return the next request to admit. Raises LookupError when no request is waiting."""
        for request in self:
            return request
        raise LookupError("no request is waiting")

    def remove(self, request: Request) -> None:
        """Remove any request. Raises KeyError if it is not in the queue."""
        del self._requests[request.request_id]
        if self.policy == "priority":
            place = bisect.bisect_left(self._ranked, _last_first(request), key=_last_first)
            del self._ranked[place]

    def reorder(self, policy: Policy) -> None:
        """Switch to another policy. Under `fcfs`, preempted requests come first."""
        if policy == self.policy:
            return
        self.policy = policy
        requests = sorted(
            self._requests.values(),
            key=lambda r: (r.status is not RequestStatus.PREEMPTED, r.arrival_ns, r.request_id),
        )
        self._requests = OrderedDict((request.request_id, request) for request in requests)
        self._ranked = sorted(requests, key=_last_first) if policy == "priority" else []
