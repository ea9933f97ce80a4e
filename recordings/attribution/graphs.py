"""`GraphSizes`: in which kind of CUDA graph steps of each size ran, and how long they took."""

import statistics
from array import array
from typing import NamedTuple

from stepscope.engine.protocol.wire import StepRecord


class GraphSize(NamedTuple):
    """Steps of about the same size that ran in the same kind of graph."""

    kind: str  # full, piecewise or none
    least_tokens: int  # computed for requests, without what filled the graph up
    most_tokens: int
    num_steps: int
    share: float  # of all steps whose graph is known
    median_ms: float  # of the device, or else from the launch of the model to the tokens


class GraphSizes:
    def __init__(self) -> None:
        # (power of two of the tokens, kind) -> tokens and time of each step, in turns.
        self._seen: dict[tuple[int, str], array[int]] = {}

    def take(self, record: StepRecord) -> None:
        if record.cuda_graph is None:
            return
        tokens = record.num_prefill_tokens + record.num_decode_tokens
        start_ns = record.launch_ns or record.schedule_end_ns or record.schedule_start_ns
        size = max(0, tokens - 1).bit_length()
        of = self._seen.setdefault((size, record.cuda_graph), array("q"))
        of.extend((tokens, record.device_ns or record.tokens_ns - start_ns))

    def found(self) -> list[GraphSize]:
        """All sizes, the smallest first."""
        num_steps = sum(len(each) // 2 for each in self._seen.values())
        return [
            GraphSize(
                kind,
                min(each[::2]),
                max(each[::2]),
                len(each) // 2,
                len(each) / 2 / num_steps,
                statistics.median(each[1::2]) / 1e6,
            )
            for (_, kind), each in sorted(self._seen.items())
        ]
