"""`CostModel`: step times that a test can compute."""

from msgspec import Struct

from stepscope.engine.simulation.step_time import StepShape, StepTime


class CostModel(Struct, frozen=True, kw_only=True):
    """A simple `StepTimeModel`: a constant time, plus times per token and per query-key pair."""

    floor_ms: float = 8.0
    token_us: float = 40.0
    context_ns: float = 20.0
    host_ms: float = 0.2

    def step_time(self, shape: StepShape) -> StepTime:
        # A token's own key counts half, so that a chunk of n tokens alone counts n * n / 2.
        pairs = shape.num_prefill_pairs + shape.num_context_tokens - shape.num_tokens / 2
        ns = self.floor_ms * 1e6 + shape.num_tokens * self.token_us * 1e3 + pairs * self.context_ns
        return StepTime(ns / 1e9, self.host_ms / 1e3)
