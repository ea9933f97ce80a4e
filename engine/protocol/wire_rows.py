"""Telemetry: the rows of a step record, for requests and KV blocks. A part of `wire`.

Rows are array-encoded, so new fields go to their end.
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum, IntFlag
from itertools import pairwise

from msgspec import Struct

TICK_NS = 20_000  # unit of the times in `FrontEnd`


class Phase(IntEnum):
    """What a step computes for one request. A batch as a whole has no phase."""

    PREFILL = 0
    DECODE = 1
    RECOMPUTE = 2  # prefill of tokens that were computed before a preemption


class RowFlag(IntFlag):
    LAST_CHUNK = 1  # the row ends in a sampled token
    FIRST_TOKEN = 2  # ... which is the first of the request
    RESUMED = 4  # first row of a request that ran before and lost its KV blocks (a preemption)


class BatchRow(Struct, array_like=True, frozen=True, gc=False):
    """What one step computes for one request."""

    request_id: int
    phase: int  # Phase
    start: int  # position of the first token computed in this step
    num_tokens: int
    num_cached_tokens: int  # skipped because they were cached, if admitted in this step; else 0
    num_blocks: int  # held after scheduling
    flags: int  # RowFlag

    @property
    def num_hit_tokens(self) -> int:
        """Prompt tokens skipped by a prefix hit; a resumed request finds its own tokens again."""
        return 0 if self.flags & RowFlag.RESUMED else self.num_cached_tokens


class DraftRow(Struct, array_like=True, frozen=True, gc=False):
    """Result of checking one request's drafts (guessed tokens) in a step.

    The request's `BatchRow.num_tokens` counts only the tokens that it got: 1 + `num_accepted`.
    """

    request_id: int
    num_drafted: int
    num_accepted: int
    # Only with `with_tokens`: its tokens before the last one, which is in `StepRecord.token_ids`.
    token_ids: list[int] | None = None


class HeldRow(Struct, array_like=True, frozen=True, gc=False):
    """From this step on one waiting request waits for a reason of its own.

    The reason is a key of `StepRecord.waiting_reasons`; after a colon come the names of those who
    have what it waits for. Or it is `priority`: a request that arrived later went ahead; it counts
    among those that wait as all others do. Empty: it waits in the queue as all others do.
    """

    request_id: int
    reason: str
    num_blocks: int = 0  # that it holds while it waits


class TakenRow(Struct, array_like=True, frozen=True, gc=False):
    """A request that a front end has tokenised and sent to the engine."""

    request_id: int
    http_ns: int | None  # when its HTTP request came; None: not by HTTP
    sent_ns: int
    is_streamed: bool  # else its client gets the whole answer at the end


class FrontEnd(Struct, array_like=True, frozen=True, gc=False):
    """What a front end, a process that serves HTTP for the engine, did since it last told.

    It gets tokens from the engine, and writes them to clients in chunks. The chunks are in order
    of time, one entry of each list for each. Times by the engine's clock.
    """

    number: int  # of the front end, from 0
    since_ns: int
    taken: list[TakenRow]
    request_ids: list[int]
    # In units of TICK_NS, since that of the chunk before, at first since `since_ns`:
    came: list[int]  # when its tokens came from the engine
    out: list[int]  # when it had gone out
    ended: list[tuple[int, str]]  # request and reason, if the engine did not end it: stop, abort

    @classmethod
    def of(
        cls,
        number: int,
        taken: list[TakenRow],
        chunks: Sequence[tuple[int, int, int]],
        ended: list[tuple[int, str]],
    ) -> "FrontEnd":
        """Build it from `chunks` as `chunks` yields them."""
        since_ns = chunks[0][1] if chunks else 0
        came, out = ([(each[at] - since_ns) // TICK_NS for each in chunks] for at in (1, 2))
        ids = [each[0] for each in chunks]
        return cls(number, since_ns, taken, ids, _steps(came), _steps(out), ended)

    def chunks(self) -> Iterator[tuple[int, int, int]]:
        """Yield request, `came` and `out` of each chunk, in nanoseconds."""
        came_ns = out_ns = self.since_ns
        for request_id, came, out in zip(self.request_ids, self.came, self.out, strict=False):
            came_ns += came * TICK_NS
            out_ns += out * TICK_NS
            yield request_id, came_ns, out_ns


class RankTimes(Struct, array_like=True, frozen=True, gc=False):
    """What one rank, a worker process, did in a step.

    On an accelerator these are times of its host, which launches the work.
    """

    stage: int  # of the pipeline
    # In the forward pass, without `wait_ns` and without waiting for the stage before. A rank that
    # begins later than the others of its stage has been busy with something else: it counts.
    work_ns: int
    wait_ns: int | None  # in collectives, with the others; None: unknown
    # Since it had ended the step before, with nothing to do though the engine had a step in flight;
    # None: unknown.
    empty_ns: int | None


def _steps(values: list[int]) -> list[int]:
    return [value - before for before, value in pairwise([0, *values])]


class HoldUp(Struct, array_like=True, frozen=True, gc=False):
    """A time in which the engine's process or its thread was held up, and by what.

    `kind` is gc (Python's garbage collector), gc_elsewhere (on another thread, while this one
    hardly ran), jit (a kernel was compiled), stopped (nothing of the process ran) or descheduled
    (it waited for a processor, about so long).
    """

    kind: str
    start_ns: int
    ns: int
    detail: str = ""  # generation, kernel, or pages that had to be read from the disk


class PrefillPart(Struct, array_like=True, frozen=True, gc=False):
    """Prompt tokens of one request in a step that still runs."""

    request_id: int
    start: int  # position of the first token
    num_tokens: int


CACHED = -1  # free, but its content is still in the prefix cache
EMPTY = -2  # free, holds nothing


class BlockMove(Struct, array_like=True, frozen=True, gc=False):
    """State of one KV block after the step, which changed it."""

    block_id: int
    owner: int  # request id of the latest holder, or CACHED, or EMPTY
    ref_count: int


class BlockRun(Struct, array_like=True, frozen=True, gc=False):
    """`count` neighbouring blocks in the same state (run-length coding of a snapshot)."""

    count: int
    owner: int
    ref_count: int


class KVGroup(Struct, frozen=True, omit_defaults=True):
    """Layers that hold their part of a request's context alike, in KV blocks of their own."""

    kind: str  # full attention, sliding window, chunked attention or Mamba
    num_layers: int
    block_size: int  # tokens that a block covers; of Mamba layers, between two kept states
    window: int | None = None  # tokens that these layers look back on; None: all
    num_tables: int = 1  # block tables that each request has for these layers


class GroupCounts(Struct, array_like=True, frozen=True, gc=False):
    """Numbers of KV blocks of a group, as in `KVCounts`. All groups share the empty blocks."""

    used: int
    cached: int


class KVTransfers(Struct, frozen=True, gc=False, omit_defaults=True):
    """KV blocks that wait for a connector, which moves keys and values between engines or tiers.

    All of them are used blocks. The times are of the request that has waited longest.
    """

    num_loading: int = 0  # blocks of waiting requests whose keys and values are on their way
    loading_since_ns: int | None = None
    num_sending: int = 0  # blocks of requests that have ended, until they have been sent
    sending_since_ns: int | None = None


class KVCounts(Struct, frozen=True, gc=False):
    """Numbers of blocks in each state after a step, and counts of what happened in the step."""

    used: int
    cached: int
    empty: int
    evicted: int  # cached blocks overwritten in this step
    # Prompt tokens looked up in the prefix cache in this step, each once: not again after a
    # preemption. Older engines counted those again, too.
    queried_tokens: int = 0
    hit_tokens: int = 0  # ... and found

    @property
    def num_blocks(self) -> int:
        """Number of usable blocks."""
        return self.used + self.cached + self.empty


class LatencyEstimate(Struct, array_like=True, frozen=True, gc=False):
    """`count` samples of about this latency, from one bucket of a histogram."""

    ms: float
    count: int


class Totals(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counts and latencies over all requests of one record, from an engine that names no requests.

    Of an engine that publishes requests and no blocks, they only tell of the KV cache.
    """

    num_steps: int | None = None
    num_prompt_tokens: int | None = None  # of prompts that were prefilled, cached ones included
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None  # of the prompts, found in the prefix cache
    num_queried_tokens: int | None = None  # of the prompts, looked up in the prefix cache
    num_preempted: int | None = None
    num_finished: int | None = None
    is_load_known: bool = True  # false: ignore the record's counts of running and waiting requests
    kv_used: float | None = None  # share of the KV cache that requests hold, 0 to 1
    ttft: list[LatencyEstimate] = []
    itl: list[LatencyEstimate] = []
    tpot: list[LatencyEstimate] = []  # mean per output token of each finished request
