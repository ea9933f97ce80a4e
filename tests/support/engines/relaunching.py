"""A stand-in for a GPU that records graphs: to replay is to launch again, piece by piece.

As on a GPU, only the contents of tensors can change from step to step.
"""

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from stepscope.engine.execution.graphs import Cut, Graph
from stepscope.kernels.paged_attention import AttentionOptions, LayerCache, PagedBatch
from stepscope.kernels.torch_attention import TorchAttention


class RelaunchingDevice:
    """With memory in round numbers."""

    def memory(self) -> tuple[int, int, int]:
        return 1 << 30, 315 << 20, 9 << 20

    def peak_bytes(self, run: Callable[[], object]) -> int:
        run()
        return 5 << 20

    def record(self, launch: Callable[[Cut], None]) -> list[Graph]:
        num_pieces = 1

        def count() -> None:
            nonlocal num_pieces
            num_pieces += 1

        launch(count)
        if num_pieces == 1:
            return [SimpleNamespace(replay=lambda: launch(count))]
        run = _Relaunch(launch)
        return [
            SimpleNamespace(replay=run.begin if place == 0 else run.go_on)
            for place in range(num_pieces)
        ]


class _Relaunch:
    """Runs `launch` on a thread that waits at each cut for the replay of the next piece."""

    def __init__(self, launch: Callable[[Cut], None]) -> None:
        self._launch = launch
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None

    def begin(self) -> None:
        threading.Thread(
            target=self._run, args=(torch.is_inference_mode_enabled(),), daemon=True
        ).start()
        self.go_on()

    def go_on(self) -> None:
        self._go.release()
        self._stopped.acquire()
        if self._error is not None:
            raise self._error

    def _run(self, is_inference: bool) -> None:
        self._go.acquire()
        try:
            with torch.inference_mode(is_inference):
                self._launch(self._cut)
        except BaseException as error:  # noqa: BLE001 - raised again where the piece is replayed
            self._error = error
        self._stopped.release()

    def _cut(self) -> None:
        self._stopped.release()
        self._go.acquire()


class CapturableAttention:
    """Plain torch that reads the layout of a step from tensors, as a kernel in a graph does."""

    name = "capturable"
    is_capturable = True

    def __call__(
        self, query: torch.Tensor, cache: LayerCache, batch: PagedBatch, options: AttentionOptions
    ) -> torch.Tensor:
        starts, lens, tables = (each.numpy().astype(np.int64) for each in batch.on_device())
        # A row of padding has no context. It reads one key of block 0, and nobody its result.
        seen = replace(
            batch,
            query_starts=starts,
            context_lens=lens.clip(min=1),
            block_tables=tables,
            plans={},
        )
        return TorchAttention()(query, cache, seen, options)
