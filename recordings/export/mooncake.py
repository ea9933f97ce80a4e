"""Export to Mooncake's trace format: arrivals, lengths, and shared prefixes of prompts.

One JSON object per line, in order of arrival: `timestamp` (ms since the first), `input_length`,
`output_length`, `hash_ids` of the prompt's 512-token blocks (Mooncake, FAST 2025). The ids are no
hashes, because a recording need not have tokens. They are equal where hits in the engine's prefix
cache showed that the tokens are equal.

`PrefixBook`: finds which prompts begin alike, from the moves of KV blocks. A request admitted with
a hit gets blocks that another request filled with the same tokens. The cache identifies a block by
its tokens and all before them, so the last block of a hit shows which request filled the prefix,
and how long it is. Not found are prefixes no longer cached, tokens after a hit, and hits on blocks
that were filled in the same step.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import IO, NamedTuple

import msgspec

from stepscope.engine.protocol import wire
from stepscope.engine.workload.traces import HASH_BLOCK_TOKENS
from stepscope.recordings.export.moments import Moment


class Chain:
    """Ids of the blocks of one request's context. An id is created when it is first asked for."""

    __slots__ = ("_ids", "_new_ids")

    def __init__(self, ids: list[int], new_ids: "count[int]") -> None:
        self._ids = ids
        self._new_ids = new_ids

    def first(self, num_blocks: int) -> list[int]:
        while len(self._ids) < num_blocks:
            self._ids.append(next(self._new_ids))
        return self._ids[:num_blocks]


class _Table(NamedTuple):
    """The KV blocks of one request in the order of its context; None for an unknown block."""

    chain: Chain
    blocks: list[int | None]


class PrefixBook:
    """Tracks which request filled each KV block, and which block of its context that was.

    At most as many blocks are tracked as the KV cache has. The chain of a request is forgotten when
    none of its blocks is left.

    `id_tokens`: number of tokens per id.
    """

    def __init__(self, block_size: int, id_tokens: int) -> None:
        # Prompts with a hit. What a request finds of its own after a preemption is none.
        self.num_hits = 0
        self.num_unknown = 0  # hits that cannot be traced to a request
        self._id_tokens = id_tokens
        self._block_size = block_size
        self.new_ids: count[int] = count()
        self._filled: dict[int, tuple[Chain, int]] = {}
        self._tables: dict[int, _Table] = {}

    def take(
        self, moves: list[wire.BlockMove], batch: list[wire.BatchRow], admitted: list[wire.Admitted]
    ) -> dict[int, Chain]:
        """Process a step. Returns the chain of each request that it admitted, by id."""
        by_owner: dict[int, list[int]] = {}
        shared = [move.block_id for move in moves if move.ref_count > 1]
        for move in moves:
            if move.owner == wire.EMPTY:
                self._filled.pop(move.block_id, None)
            elif move.owner >= 0 and move.ref_count > 0:
                by_owner.setdefault(move.owner, []).append(move.block_id)
        chains: dict[int, Chain] = {}
        for event in admitted:
            moved = by_owner.get(event.request_id, [])
            chains[event.request_id] = self._admit(event, moved, shared)
        for row in batch:
            table = self._tables.get(row.request_id)
            if table is not None:  # else it arrived before the range
                self._grow(table, by_owner.get(row.request_id, []), row.num_blocks)
        return chains

    def leave(self, request_id: int) -> None:
        """Note that a request has ended. Later hits on these blocks are still found."""
        self._tables.pop(request_id, None)

    def _admit(self, event: wire.Admitted, moved: list[int], shared: list[int]) -> Chain:
        num_hit = event.num_cached_tokens // self._block_size
        known = None
        if num_hit:
            known = self._origin(moved[num_hit - 1 : num_hit], num_hit)
            # It may be elsewhere, if it was freed just before or a later request shares it.
            known = known or self._origin(moved, num_hit) or self._origin(shared, num_hit)
            if event.request_id not in self._tables:
                self.num_hits += 1
                self.num_unknown += known is None
        num_whole = num_hit * self._block_size // self._id_tokens
        chain = Chain(known.first(num_whole) if known else [], self.new_ids)
        hit: list[int | None] = [*moved[:num_hit]]
        self._tables[event.request_id] = _Table(chain, hit + [None] * (num_hit - len(hit)))
        return chain

    def _origin(self, blocks: list[int], num_hit: int) -> Chain | None:
        """Find the one chain that was hit: one of `blocks` is its number `num_hit` (from 1)."""
        filled = (self._filled.get(block) for block in blocks)
        chains = {id(each[0]): each[0] for each in filled if each and each[1] == num_hit - 1}
        return next(iter(chains.values())) if len(chains) == 1 else None

    def _grow(self, table: _Table, moved: list[int], num_blocks: int) -> None:
        if not moved and len(table.blocks) == num_blocks:
            return
        # A block that the request holds already is moved when another holder leaves.
        held = set(table.blocks)
        for block in moved:
            if block not in held and len(table.blocks) < num_blocks:
                self._filled[block] = (table.chain, len(table.blocks))
                table.blocks.append(block)
        table.blocks.extend([None] * (num_blocks - len(table.blocks)))


@dataclass(slots=True)
class TracedRequest:
    """A request that was seen to arrive."""

    arrived: wire.Arrived
    prefix: list[int] | None = None  # ids of its prompt's whole blocks; None before admission
    num_cached_tokens: int = 0  # at its first admission
    end: wire.Finished | wire.Aborted | None = None  # None: it still lives
    num_output_tokens: int = 0


class RequestReader:
    """Collects requests with the prefixes that they share, from the moments of a recording.

    `id_tokens`: number of tokens per id of a prefix.
    """

    def __init__(self, block_size: int, id_tokens: int = HASH_BLOCK_TOKENS) -> None:
        self.book = PrefixBook(block_size, id_tokens)
        self.requests: dict[int, TracedRequest] = {}  # in order of arrival
        self.begun: set[int] = set()  # those that were computed, but not seen to arrive
        self._id_tokens = id_tokens

    def apply(self, moment: Moment) -> None:
        message = moment.message
        if not isinstance(message, wire.StepRecord | wire.EngineStatus):
            return
        admitted = []
        for event in message.events:
            if isinstance(event, wire.Arrived):
                self.requests[event.request_id] = TracedRequest(event)
            elif isinstance(event, wire.Admitted):
                admitted.append(event)
        cached = {event.request_id: event.num_cached_tokens for event in admitted}
        batch = (message.batch or []) if isinstance(message, wire.StepRecord) else []
        # Blocks of several groups are no chain of the prompt's tokens.
        moves = message.moves if message.kv_groups is None else []
        for request_id, chain in self.book.take(moves, batch, admitted).items():
            request = self.requests.get(request_id)
            if request is not None and request.prefix is None:
                num_ids = request.arrived.num_prompt_tokens // self._id_tokens
                request.prefix = list(chain.first(num_ids))
                request.num_cached_tokens = cached[request_id]
        self.begun.update([row.request_id for row in batch if row.request_id not in self.requests])
        for event in message.events:
            if isinstance(event, wire.Finished | wire.Aborted):
                self.book.leave(event.request_id)
                if (request := self.requests.get(event.request_id)) is not None:
                    view = moment.state.requests.get(event.request_id)
                    told = event if isinstance(event, wire.Finished) else view
                    request.end = event
                    request.num_output_tokens = 0 if told is None else told.num_output_tokens

    def close(self, last: Moment | None) -> None:
        """Give the requests that still live the tokens that they have after the last moment."""
        views = {} if last is None else last.state.requests
        for request_id, request in self.requests.items():
            if request.end is None and request_id in views:
                request.num_output_tokens = views[request_id].num_output_tokens


class MooncakeWriter:
    """Writes requests as lines, each once all that arrived earlier are written."""

    def __init__(self, stream: IO[bytes], block_size: int) -> None:
        self.num_lines = 0
        self.num_without_output = 0  # left out, as they got no token
        self.num_unfinished = 0  # written before their end
        self.reader = RequestReader(block_size)
        self._stream = stream
        self._first_ns: int | None = None

    def write(self, *, is_over: bool = False) -> None:
        """Write the requests that are ready; at the end of the range, all."""
        requests = self.reader.requests
        while requests and (is_over or next(iter(requests.values())).end is not None):
            request = requests.pop(next(iter(requests)))
            arrived, num_output = request.arrived, request.num_output_tokens
            self.num_unfinished += request.end is None and num_output > 0
            if num_output < 1 or arrived.num_prompt_tokens < 1:
                self.num_without_output += 1
                continue
            hash_ids = request.prefix or []
            if request.prefix is not None and arrived.num_prompt_tokens % HASH_BLOCK_TOKENS:
                hash_ids.append(next(self.reader.book.new_ids))
            if self._first_ns is None:
                self._first_ns = arrived.time_ns
            document = {
                "timestamp": round((arrived.time_ns - self._first_ns) / 1e6),
                "input_length": arrived.num_prompt_tokens,
                "output_length": num_output,
                "hash_ids": hash_ids,
            }
            self._stream.write(msgspec.json.encode(document) + b"\n")
            self.num_lines += 1


def write_mooncake(
    moments: Iterable[Moment], stream: IO[bytes], block_size: int | None
) -> MooncakeWriter:
    """Write the requests. Returns the `MooncakeWriter`, which has counts of what was written."""
    writer = MooncakeWriter(stream, block_size or HASH_BLOCK_TOKENS)
    last: Moment | None = None
    for last in moments:
        writer.reader.apply(last)
        writer.write()
    writer.reader.close(last)
    writer.write(is_over=True)
    return writer
