"""`LaunchedStep`: a step that runs on a device, and its results once it has ended."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stepscope.engine.execution.machine.devices import DeviceTimer
from stepscope.engine.execution.sampling.host_sampling import UNSOUND, Sampled, SamplesInFlight
from stepscope.engine.scheduling.acceptance import bursts_of
from stepscope.engine.scheduling.step import ScheduledRow, StepResult
from stepscope.kernels.paged_attention import to_device


@dataclass(slots=True)
class LaunchedStep:
    """A step that was launched as a whole (not in halves), and may still be running."""

    rows: Sequence[ScheduledRow]
    sampling_rows: list[int]  # indices of those that sample; one with drafts occurs several times
    samples: SamplesInFlight | None
    timer: DeviceTimer
    launch_ns: int
    clock: Callable[[], int]
    num_padded_tokens: int
    has_drafts: bool = False
    cuda_graph: str | None = None
    is_whole: bool = True

    def tokens_of(self, request_ids: Sequence[int]) -> torch.Tensor:
        """Return the requests' new tokens as a device tensor, without waiting for the step."""
        assert self.samples is not None, "only a step that samples has a token to come"
        rows, tokens = self.rows, self.samples.tokens
        places = {rows[row].request.request_id: i for i, row in enumerate(self.sampling_rows)}
        wanted = np.array([places[request_id] for request_id in request_ids], dtype=np.int64)
        return tokens.index_select(0, to_device(wanted, tokens.device))

    def collect(self) -> StepResult:
        sampled = Sampled([], {}) if self.samples is None else self.samples.collect()
        device_ns = self.timer.elapsed_ns()
        tokens_ns = self.clock()
        token_ids: list[int | None] = [None] * len(self.rows)
        unsound: set[int] = set()
        for row, token_id in zip(self.sampling_rows, sampled.token_ids, strict=True):
            token_ids[row] = token_id
            if token_id == UNSOUND:
                unsound.add(row)
        bursts = None
        if self.has_drafts:
            sampled_of: dict[int, list[int]] = {}
            for row, token_id in zip(self.sampling_rows, sampled.token_ids, strict=True):
                sampled_of.setdefault(row, []).append(token_id)
            bursts = bursts_of(self.rows, sampled_of)
            for row, burst in bursts.items():
                token_ids[row] = burst[-1]
                if UNSOUND not in burst:  # what follows a rejected draft does not matter
                    unsound.discard(row)
        return StepResult(
            token_ids,
            self.launch_ns,
            tokens_ns,
            device_ns,
            num_padded_tokens=self.num_padded_tokens,
            logprobs={self.sampling_rows[i]: found for i, found in sampled.logprobs.items()},
            bursts=bursts,
            cuda_graph=self.cuda_graph,
            unsound_rows=tuple(sorted(unsound)),
        )
