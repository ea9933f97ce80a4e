"""The inputs of recorded steps: tensors at fixed addresses, filled before each replay."""

from typing import NamedTuple

import numpy as np
import torch

from stepscope.engine.execution.input_batch import InputBatch
from stepscope.kernels.paged_attention import BatchTensors, PagedBatch, to_device


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
