"""`LaunchedStep`: a step that runs on a device, and its results once it has ended."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from stepscope.engine.execution.machine.devices import DeviceTimer
from stepscope.engine.execution.sampling.samples import UNSOUND, Sampled, SamplesInFlight
from stepscope.engine.scheduling.acceptance import bursts_of
from stepscope.engine.scheduling.step import ScheduledRow, StepResult
from stepscope.kernels.paged_attention import to_device


class LaunchedStep:
    """A step that was launched as a whole (not in halves), and may still be running.

    `sampling_rows`: indices of the rows that sample. A row with drafts occurs several times.
    """

    is_whole = True

    def __init__(
        self,
        rows: Sequence[ScheduledRow],
        sampling_rows: list[int],
        samples: SamplesInFlight | None,
        timer: DeviceTimer,
        launch_ns: int,
        clock: Callable[[], int],
        num_padded_tokens: int,
        has_drafts: bool = False,
        cuda_graph: str | None = None,
    ) -> None:
        self._rows = rows
        self._sampling_rows = sampling_rows
        self._samples = samples
        self._timer = timer
        self._launch_ns = launch_ns
        self._clock = clock
        self._num_padded_tokens = num_padded_tokens
        self._has_drafts = has_drafts
        self._cuda_graph = cuda_graph

    def tokens_of(self, request_ids: Sequence[int]) -> torch.Tensor:
        """Return the requests' new tokens as a device tensor, without waiting for the step."""
        assert self._samples is not None, "only a step that samples has a token to come"
        rows, tokens = self._rows, self._samples.tokens
        places = {rows[row].request.request_id: i for i, row in enumerate(self._sampling_rows)}
        wanted = np.array([places[request_id] for request_id in request_ids], dtype=np.int64)
        return tokens.index_select(0, to_device(wanted, tokens.device))

    def collect(self) -> StepResult:
        sampled = Sampled([], {}) if self._samples is None else self._samples.collect()
        device_ns = self._timer.elapsed_ns()
        tokens_ns = self._clock()
        token_ids: list[int | None] = [None] * len(self._rows)
        unsound: set[int] = set()
        for row, token_id in zip(self._sampling_rows, sampled.token_ids, strict=True):
            token_ids[row] = token_id
            if token_id == UNSOUND:
                unsound.add(row)
        bursts = None
        if self._has_drafts:
            sampled_of: dict[int, list[int]] = {}
            for row, token_id in zip(self._sampling_rows, sampled.token_ids, strict=True):
                sampled_of.setdefault(row, []).append(token_id)
            bursts = bursts_of(self._rows, sampled_of)
            for row, burst in bursts.items():
                token_ids[row] = burst[-1]
                if UNSOUND not in burst:  # what follows a rejected draft does not matter
                    unsound.discard(row)
        return StepResult(
            token_ids,
            self._launch_ns,
            tokens_ns,
            device_ns,
            num_padded_tokens=self._num_padded_tokens,
            logprobs={self._sampling_rows[i]: found for i, found in sampled.logprobs.items()},
            bursts=bursts,
            cuda_graph=self._cuda_graph,
            unsound_rows=tuple(sorted(unsound)),
        )
