"""`Outcome`: latency samples and counts that `SessionState` derives from one step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stepscope.engine.protocol.wire import StepRecord


def coarse(ns: int) -> int:
    """Round to less than 2 %: chunks go out one by one, so few gaps are quite equal."""
    shift = max(0, ns.bit_length() - 6)
    return (ns >> shift << shift) + (1 << shift >> 1)


class FinishedRequest(NamedTuple):
    """Latencies of a request that was observed from its arrival to its end, in nanoseconds."""

    ttft_ns: int
    worst_itl_ns: int  # the longest gap between two of its tokens; 0 if no gap was above `floor_ns`
    floor_ns: int  # shorter gaps were not recorded


@dataclass(slots=True)
class Outcome:
    """Latency samples (in nanoseconds) and counts of one step.

    Requests that decode in the same steps have equal gaps between two tokens.
    """

    # Length of a gap -> number of requests that had such a gap.
    gaps_ns: dict[int, int] = field(default_factory=dict)
    # Length of a gap -> id of one of these requests.
    gap_request_ids: dict[int, int] = field(default_factory=dict)
    ttft_ns: list[tuple[int, int]] = field(default_factory=list)  # (request id, time)
    tpot_ns: list[tuple[int, int]] = field(default_factory=list)
    # Most steps have none of these, so the default is one shared empty tuple.
    e2e_ns: Sequence[tuple[int, int]] = ()  # from arrival to the last token
    late_gaps: Sequence[tuple[int, int]] = ()  # above the table's `late_ns`
    # Requests and gaps that were their longest so far, by `RequestWatch`.
    longer: Sequence[tuple[int, int]] = ()
    finished: Sequence[FinishedRequest] = ()  # by `RequestWatch`
    # What front ends told since the step before: from HTTP to the first chunk, by request; and how
    # many gaps between two chunks were about so long (`coarse`).
    served_ttft_ns: Sequence[tuple[int, int]] = ()
    served_itl_ns: Mapping[int, int] = field(default_factory=dict)
    num_output_tokens: int = 0
    num_decode_rows: int = 0
    num_cached_tokens: int = 0  # of prompts, skipped by a prefix hit
    # Prompt tokens looked up in the prefix cache, and those found, each once. None is unknown.
    num_queried_tokens: int | None = None
    num_hit_tokens: int | None = None
    # Of those not found: evicted, diverged; and what a pool 1.5 times and twice as large would have
    # hit (the first fields of `PrefixMisses`). None is unknown.
    num_missed_tokens: tuple[int, ...] | None = (0, 0, 0, 0)
    # In the prefill of requests that come back, all but new prompt tokens.
    num_recomputed_tokens: int = 0
    num_cut_rows: int = 0  # prompts that are not complete after the step
    num_attended: int = 0  # by prefill: for each chunk, its tokens times (they and those before)
    num_arrived: int = 0
    num_finished: int = 0
    num_preempted: int = 0
    paused_ns: int = 0  # the operator's pause right before the step

    def add_gaps(self, gap_ns: int, number: int, request_id: int) -> None:
        self.gaps_ns[gap_ns] = self.gaps_ns.get(gap_ns, 0) + number
        self.gap_request_ids.setdefault(gap_ns, request_id)

    @property
    def max_gap_ns(self) -> int | None:
        """The longest gap between two tokens; None if there was no gap."""
        return max(self.gaps_ns, default=None)


class AppliedStep(NamedTuple):
    sequence: int  # number of its message
    record: StepRecord
    outcome: Outcome
    # Whether the record is of one forward step, not of all those of an interval.
    is_one_step: bool = True
