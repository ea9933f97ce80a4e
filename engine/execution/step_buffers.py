"""`StepBuffers`: the inputs of decode steps on a device, at fixed addresses.

The host writes a step into page-locked memory, then copies it to the device. There a CUDA graph
reads it.
"""

from typing import NamedTuple

import numpy as np
import torch

from stepscope.engine.execution.input_batch import InputBatch
from stepscope.kernels.paged_attention import BatchTensors, PagedBatch, to_device


class StepInputs(NamedTuple):
    """A model's inputs.

    If they belong to `StepBuffers`, they are decodes: one token per request.
    """

    input_ids: torch.Tensor  # [size] int64, like the next two
    positions: torch.Tensor
    logits_of: torch.Tensor
    batch: PagedBatch  # those of `StepBuffers` have host arrays for the longest possible contexts


class StepBuffers:
    """Inputs for up to `most` requests of up to `max_model_len` tokens.

    The rows after a step's last request are padding. They read nothing, and write to
    `scratch_slot`, a KV slot that no request uses.
    """

    def __init__(
        self,
        most: int,
        max_model_len: int,
        block_size: int,
        scratch_slot: int,
        device: torch.device,
    ) -> None:
        self._max_model_len = max_model_len
        self._block_size = block_size
        self._scratch_slot = scratch_slot
        self._device = device
        num_blocks = -(-max_model_len // block_size)
        is_cuda = device.type == "cuda"
        # Input ids, positions and slots, in one tensor so that one copy moves all three.
        self._host_tokens = torch.zeros(3, most, dtype=torch.int64, pin_memory=is_cuda)
        self._tokens = torch.zeros(3, most, dtype=torch.int64, device=device)
        self._host_lens = torch.zeros(most, dtype=torch.int32, pin_memory=is_cuda)
        self._lens = torch.zeros(most, dtype=torch.int32, device=device)
        self._host_tables = torch.zeros(most * num_blocks, dtype=torch.int32, pin_memory=is_cuda)
        self._staged_tables = torch.zeros(most * num_blocks, dtype=torch.int32, device=device)
        self._tables = torch.zeros(most, num_blocks, dtype=torch.int32, device=device)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(most, dtype=torch.int64, device=device)
        self._tokens[2] = scratch_slot
        self._copied = torch.cuda.Event() if is_cuda else None

    def inputs(self, size: int) -> StepInputs:
        """Return inputs that are views of the first `size` rows."""
        input_ids, positions, slots = (row[:size] for row in self._tokens)
        return StepInputs(
            input_ids,
            positions,
            self._rows[:size],
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
        """Copy a step with one token per request to the device, padded to `size` rows."""
        if self._copied is not None:
            self._copied.synchronize()  # the last step's copies must have left host memory
        count = len(batch.input_ids)
        tokens = self._host_tokens.numpy()
        for row, array, filler in (
            (0, batch.input_ids, 0),
            (1, batch.positions, 0),
            (2, batch.slot_mapping, self._scratch_slot),
        ):
            tokens[row, :count] = array
            tokens[row, count:] = filler
        lens = self._host_lens.numpy()
        lens[:count] = batch.context_lens
        lens[count:size] = 0
        width = batch.block_tables.shape[1]
        used = count * width
        self._host_tables.numpy()[:used] = batch.block_tables.ravel()
        self._tokens.copy_(self._host_tokens, non_blocking=True)
        if fed is not None:
            self._tokens[0].index_copy_(0, to_device(np.array(batch.fed_at), self._device), fed)
        self._lens[:size].copy_(self._host_lens[:size], non_blocking=True)
        # Copy only the width of the longest context, because the whole table may be megabytes.
        self._staged_tables[:used].copy_(self._host_tables[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self._tables[:count, :width].copy_(self._staged_tables[:used].view(count, width))
