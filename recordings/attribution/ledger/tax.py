"""`RecomputeTax`: how much of a session was spent on recomputing preempted requests."""

from typing import NamedTuple


class RecomputeTax(NamedTuple):
    """How much of a session was spent on recomputing preempted requests. None is unknown.

    Attributes:
        num_tokens: all tokens that the session computed.
        step_ns: the time of all steps.
    """

    num_preemptions: int
    num_lost: int | None
    num_recomputed: int | None
    num_tokens: int
    recompute_ns: float | None
    step_ns: int

    @property
    def token_share(self) -> float | None:
        if self.num_recomputed is None or not self.num_tokens:
            return None
        return self.num_recomputed / self.num_tokens

    @property
    def time_share(self) -> float | None:
        if self.recompute_ns is None or not self.step_ns:
            return None
        return self.recompute_ns / self.step_ns
