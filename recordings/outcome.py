"""`Outcome`: what one step brought to light, on its way from the reducer to who keeps samples."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """Latency samples (in nanoseconds) and counts of one step.

    Gaps between two tokens come as gap -> number of requests: those that decode side by side share
    theirs.
    """

    gaps_ns: dict[int, int] = field(default_factory=dict)
    max_gap_ns: int | None = None
    max_gap_request_id: int | None = None
    ttft_ns: list[tuple[int, int]] = field(default_factory=list)  # (request id, time)
    tpot_ns: list[tuple[int, int]] = field(default_factory=list)
    num_output_tokens: int = 0
    num_decode_rows: int = 0
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_arrived: int = 0
    num_finished: int = 0
    num_preempted: int = 0
