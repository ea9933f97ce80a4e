"""The inputs of a step: `build` lays out its rows as arrays on the host, in every step.

`TokenBuffers` and `DecodeBuffers`: inputs of recorded steps, tensors at fixed addresses that are
filled before each replay.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from stepscope.engine.protocol.wire import Phase
from stepscope.engine.scheduling.acceptance import has_drafts
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.step import ScheduledRow
from stepscope.kernels.paged_attention import BatchTensors, IntArray, PagedBatch, to_device


class InputBatch(NamedTuple):
    """One flattened step: the tokens of R requests, one request after the other."""

    input_ids: IntArray  # [num_tokens]
    positions: IntArray  # [num_tokens], of each token in its request
    slot_mapping: IntArray  # [num_tokens], KV slot of each token
    query_starts: IntArray  # [R + 1]
    context_lens: IntArray  # [R], tokens of the request after this step
    block_tables: IntArray  # [R, blocks of the longest], padded with any valid blocks
    decodes: IntArray  # [R], 1 for a decode, 0 for a prefill chunk, even of one token
    sampling_rows: list[int]  # rows to sample a token for; with drafts a row occurs several times
    logits_of: IntArray  # position in `input_ids` of the last token of each sampling row
    # Tokens that a step in flight has not produced yet: their positions in `input_ids`, which has 0
    # there, ...
    fed_at: Sequence[int] = ()
    fed_by: Sequence[int] = ()  # ... and the ids of their requests
    depths: Sequence[int] = ()  # number of drafts before each sampling row; empty without drafts


class BlockTables:
    """A copy of the block tables of running requests, as rows of one array.

    In each step, only new block ids are appended. Copying whole lists of thousands of ids would be
    the most expensive host work of a step. Comparing a list with its earlier copy costs only a few
    nanoseconds per id.
    """

    def __init__(self) -> None:
        self._table: IntArray = np.zeros((64, 64), dtype=np.int64)
        self._row_of: dict[int, int] = {}
        self._known: list[list[int]] = [[] for _ in range(len(self._table))]
        self._free = list(range(len(self._table)))

    def gather(self, requests: Sequence[Request]) -> IntArray:
        """Return a copy of the requests' block tables, [requests, blocks of the longest table]."""
        width = max(len(request.block_table) for request in requests)
        if width > self._table.shape[1]:
            grown = np.zeros((len(self._table), 2 * width), dtype=np.int64)
            grown[:, : self._table.shape[1]] = self._table
            self._table = grown
        if len(requests) > len(self._free):
            self._make_room(requests)
        rows = [self._update(request) for request in requests]
        return self._table[rows, :width]

    def _update(self, request: Request) -> int:
        table = request.block_table
        row = self._row_of.get(request.request_id)
        if row is None:
            row = self._row_of[request.request_id] = self._free.pop()
            self._known[row] = []
        known = self._known[row]
        num_known = len(known)
        if table[:num_known] != known:  # preempted and admitted again
            known.clear()
            num_known = 0
        if len(table) > num_known:
            new = table[num_known:]
            self._table[row, num_known : len(table)] = new
            known.extend(new)
        return row

    def _make_room(self, requests: Sequence[Request]) -> None:
        """Free the rows of requests outside the step. Then add rows if there are still too few."""
        needed = {request.request_id for request in requests}
        for request_id in [known for known in self._row_of if known not in needed]:
            self._free.append(self._row_of.pop(request_id))
        missing = len(needed) - len(self._row_of) - len(self._free)
        if missing > 0:
            num_rows = len(self._table)
            added = max(missing, num_rows)
            empty = np.zeros((added, self._table.shape[1]), dtype=np.int64)
            self._table = np.concatenate([self._table, empty])
            self._known.extend([] for _ in range(added))
            self._free.extend(range(num_rows, num_rows + added))


def build(
    rows: Sequence[ScheduledRow], tables: BlockTables, block_size: int, *, ahead: bool = False
) -> InputBatch:
    """Return the input arrays of a step. `ahead`: rows may begin with a token still to come."""
    num_rows = len(rows)
    starts = np.fromiter((row.start for row in rows), np.int64, num_rows)
    counts = np.fromiter((row.num_tokens for row in rows), np.int64, num_rows)
    decodes = np.fromiter((row.phase is Phase.DECODE for row in rows), np.int64, num_rows)
    if (decodes & (counts > 1)).any():
        return _build_with_drafts(rows, tables, block_size)
    query_starts = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(counts, out=query_starts[1:])
    num_tokens = int(query_starts[-1])

    input_ids = np.empty(num_tokens, dtype=np.int64)
    fed_at: list[int] = []
    fed_by: list[int] = []
    at = 0
    for row in rows:
        token_ids = row.request.token_ids
        if row.num_tokens != 1:
            input_ids[at : at + row.num_tokens] = token_ids[row.start : row.start + row.num_tokens]
        elif row.start < len(token_ids):
            input_ids[at] = token_ids[row.start]
        elif ahead:
            input_ids[at] = 0
            fed_at.append(at)
            fed_by.append(row.request.request_id)
        else:
            input_ids[at] = row.request.draft_token_ids[row.start - len(token_ids)]
        at += row.num_tokens

    block_tables = tables.gather([row.request for row in rows])
    positions = np.arange(num_tokens) + np.repeat(starts - query_starts[:-1], counts)
    blocks = block_tables[np.repeat(np.arange(num_rows), counts), positions // block_size]
    sampling_rows = [i for i, row in enumerate(rows) if row.samples]
    return InputBatch(
        input_ids=input_ids,
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        query_starts=query_starts,
        context_lens=starts + counts,
        block_tables=block_tables,
        decodes=decodes,
        sampling_rows=sampling_rows,
        logits_of=query_starts[1:][sampling_rows] - 1,
        fed_at=fed_at,
        fed_by=fed_by,
    )


def _build_with_drafts(
    rows: Sequence[ScheduledRow], tables: BlockTables, block_size: int
) -> InputBatch:
    """Return the input arrays of a step with each draft token as a separate decode.

    A draft comes right after the token before it. So the logits of a draft are bit-identical to
    those of a decode without drafts, and a step without prefill chunks can run as a CUDA graph. A
    draft sees the keys of the drafts before it, because a layer stores the keys of all rows before
    any row reads them.
    """
    places = [  # for each row that is laid out, its original row and depth in it
        (index, depth)
        for index, row in enumerate(rows)
        for depth in range(row.num_tokens if has_drafts(row) else 1)
    ]
    laid_out = [
        row._replace(start=row.start + depth, num_tokens=1) if has_drafts(row) else row
        for row, depth in ((rows[index], depth) for index, depth in places)
    ]
    batch = build(laid_out, tables, block_size)
    return batch._replace(
        sampling_rows=[places[i][0] for i in batch.sampling_rows],
        depths=[places[i][1] for i in batch.sampling_rows],
    )


class StepInputs(NamedTuple):
    """A model's inputs. Those of `DecodeBuffers` are decodes: one token per request."""

    input_ids: torch.Tensor  # [size] int64, like the next two
    positions: torch.Tensor
    logits_of: torch.Tensor
    batch: PagedBatch  # those of `DecodeBuffers` have host arrays for the longest possible contexts


class TokenBuffers:
    """Ids, positions, slots and places of logits for up to `most` tokens.

    The tokens after a step's last are padding. They write to `scratch_slot`, a KV slot that no
    request uses.
    """

    def __init__(self, most: int, block_size: int, scratch_slot: int, device: torch.device) -> None:
        self._block_size = block_size
        self._scratch_slot = scratch_slot
        self._device = device
        is_cuda = device.type == "cuda"
        # One tensor, so that one copy moves all four.
        self._host = torch.zeros(4, most, dtype=torch.int64, pin_memory=is_cuda)
        self.rows = torch.zeros(4, most, dtype=torch.int64, device=device)
        self.rows[2] = scratch_slot
        self._copied = torch.cuda.Event() if is_cuda else None

    def inputs(self, size: int, num_logits: int) -> StepInputs:
        """Return inputs that are views of the first `size` tokens, of any requests."""
        input_ids, positions, slots, logits_of = self.rows
        return StepInputs(
            input_ids[:size],
            positions[:size],
            logits_of[:num_logits],
            PagedBatch(
                query_starts=np.array([0, size]),
                context_lens=np.array([size]),
                block_tables=np.zeros((1, 1), dtype=np.int64),
                slot_mapping=slots[:size],
                block_size=self._block_size,
                device=self._device,
            ),
        )

    def fill(self, batch: InputBatch, size: int, fed: torch.Tensor | None = None) -> None:
        """Copy the inputs of a step to the device, padded to `size` tokens.

        `fed`: tokens for the positions `batch.fed_at`, on the device. The step before samples them.
        """
        if self._copied is not None:
            self._copied.synchronize()  # the last step's copies must have left host memory
        rows = self._host.numpy()
        for row, array, filler in (
            (0, batch.input_ids, 0),
            (1, batch.positions, 0),
            (2, batch.slot_mapping, self._scratch_slot),
            (3, batch.logits_of, 0),
        ):
            rows[row, : len(array)] = array
            rows[row, len(array) :] = filler
        self.rows.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        if fed is not None:
            self.rows[0].index_copy_(0, to_device(np.array(batch.fed_at), self._device), fed)


class DecodeBuffers(TokenBuffers):
    """Inputs for up to `most` requests of up to `max_model_len` tokens, one in the step each.

    The rows after a step's last request are padding. They read nothing.
    """

    def __init__(
        self,
        most: int,
        max_model_len: int,
        block_size: int,
        scratch_slot: int,
        device: torch.device,
    ) -> None:
        super().__init__(most, block_size, scratch_slot, device)
        self._max_model_len = max_model_len
        num_blocks = -(-max_model_len // block_size)
        is_cuda = device.type == "cuda"
        self._host_lens = torch.zeros(most, dtype=torch.int32, pin_memory=is_cuda)
        self._lens = torch.zeros(most, dtype=torch.int32, device=device)
        self._host_tables = torch.zeros(most * num_blocks, dtype=torch.int32, pin_memory=is_cuda)
        self._staged_tables = torch.zeros(most * num_blocks, dtype=torch.int32, device=device)
        self._tables = torch.zeros(most, num_blocks, dtype=torch.int32, device=device)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._requests = torch.arange(most, dtype=torch.int64, device=device)

    def inputs(self, size: int, num_logits: int) -> StepInputs:
        """Return inputs that are views of the first `size` rows; each has logits."""
        input_ids, positions, slots, _ = (row[:size] for row in self.rows)
        return StepInputs(
            input_ids,
            positions,
            self._requests[:num_logits],
            PagedBatch(
                query_starts=np.arange(size + 1),
                context_lens=np.full(size, self._max_model_len),
                block_tables=np.zeros((size, self._tables.shape[1]), dtype=np.int64),
                slot_mapping=slots,
                block_size=self._block_size,
                device=self._device,
                tensors=BatchTensors(
                    self._starts[: size + 1], self._lens[:size], self._tables[:size]
                ),
            ),
        )

    def fill(self, batch: InputBatch, size: int, fed: torch.Tensor | None = None) -> None:
        super().fill(batch, size, fed)  # which waits for the last step's copies
        count = len(batch.input_ids)
        lens = self._host_lens.numpy()
        lens[:count] = batch.context_lens
        lens[count:size] = 0
        width = batch.block_tables.shape[1]
        used = count * width
        self._host_tables.numpy()[:used] = batch.block_tables.ravel()
        self._lens[:size].copy_(self._host_lens[:size], non_blocking=True)
        # Copy only the width of the longest context, because the whole table may be megabytes.
        self._staged_tables[:used].copy_(self._host_tables[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self._tables[:count, :width].copy_(self._staged_tables[:used].view(count, width))
