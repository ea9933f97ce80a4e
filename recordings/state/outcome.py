"""`Outcome`: what one step brought to light, on its way from the reducer to who keeps samples."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """Latency samples (in nanoseconds) and counts of one step.

    Gaps between two tokens come as gap -> number of requests: those that decode side by side share
    theirs. One of them is named for each gap. Those who have never waited longer are named if the
    table of requests keeps `longest_gaps`.
    """

    gaps_ns: dict[int, int] = field(default_factory=dict)
    gap_request_ids: dict[int, int] = field(default_factory=dict)
    longer_request_ids: list[int] = field(default_factory=list)
    ttft_ns: list[tuple[int, int]] = field(default_factory=list)  # (request id, time)
    tpot_ns: list[tuple[int, int]] = field(default_factory=list)
    num_output_tokens: int = 0
    num_decode_rows: int = 0
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_attended: int = 0  # by prefill: each chunk times its tokens and those before it
    num_arrived: int = 0
    num_finished: int = 0
    num_preempted: int = 0

    def add_gaps(self, gap_ns: int, number: int, request_id: int) -> None:
        """So many requests have waited for so long, this one among them."""
        self.gaps_ns[gap_ns] = self.gaps_ns.get(gap_ns, 0) + number
        self.gap_request_ids.setdefault(gap_ns, request_id)

    @property
    def max_gap_ns(self) -> int | None:
        """The longest gap between two tokens."""
        return max(self.gaps_ns, default=None)

    @property
    def max_gap_request_id(self) -> int | None:
        """Whose it is."""
        gap_ns = self.max_gap_ns
        return None if gap_ns is None else self.gap_request_ids[gap_ns]

    @property
    def max_ttft(self) -> tuple[int, int] | None:
        """Request and time of the first token that took longest."""
        return max(self.ttft_ns, key=_time, default=None)


def _time(sample: tuple[int, int]) -> int:
    return sample[1]
