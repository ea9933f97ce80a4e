"""`RunSums`: sums up one simulated run as figures (latencies, rates, counts), in bounded memory."""

from msgspec import Struct

from stepscope.engine.simulation.replica import EndedRequest
from stepscope.recordings.state.distribution import Distribution
from stepscope.recordings.state.latency import SLO

RANKS = (50, 95, 99)
_RATES = (
    "requests_per_s", "output_tokens_per_s", "prefill_tokens_per_s", "hit_share",
    "num_preemptions", "num_steps", "goodput_per_s",
)  # fmt: skip


class Spread(Struct, frozen=True):
    """Nearest-rank percentiles and the maximum in milliseconds; None without samples."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


class RunFigures(Struct, frozen=True, kw_only=True):
    """Figures of one run.

    Rates are per second of simulated time, from the first arrival to the last token.
    """

    num_requests: int
    num_steps: int
    seconds: float
    ttft_ms: Spread
    itl_ms: Spread
    e2e_ms: Spread
    requests_per_s: float
    output_tokens_per_s: float
    prefill_tokens_per_s: float
    hit_share: float  # share of prompt tokens that were cached at admission
    num_preemptions: int
    goodput_per_s: float  # requests per second that kept their service levels


class RunSums:
    """A `FigureSink` that sums up one run, judged by the service levels `level`."""

    def __init__(self, level: SLO) -> None:
        self.ttft, self.itl, self.e2e = Distribution(), Distribution(), Distribution()
        self._level = level
        self._num_good = self.num_steps = self._num_prefill_tokens = self._num_output_tokens = 0
        self._num_prompt_tokens = self._num_hit_tokens = 0
        self._num_preemptions = 0
        self._first_ns: int | None = None
        self._last_ns = 0

    @property
    def num_finished(self) -> int:
        return self.e2e.count

    def add_step(self, num_prefill_tokens: int, num_decode_tokens: int, num_steps: int) -> None:
        self.num_steps += num_steps
        self._num_prefill_tokens += num_prefill_tokens * num_steps

    def add_gaps(self, gap_ns: int, count: int) -> None:
        self.itl.add(gap_ns, count)

    def add_first(self, ttft_ns: int) -> None:
        self.ttft.add(ttft_ns)

    def add_preemption(self) -> None:
        self._num_preemptions += 1

    def add_finished(self, request: EndedRequest, worst_itl_ns: int) -> None:
        first_ns, last_ns = request.first_token_ns, request.last_token_ns
        assert first_ns is not None
        assert last_ns is not None
        self.e2e.add(last_ns - request.arrival_ns)
        self._num_output_tokens += request.num_output_tokens
        self._num_prompt_tokens += request.num_prompt_tokens
        self._num_hit_tokens += request.num_cached_tokens
        if self._first_ns is None or request.arrival_ns < self._first_ns:
            self._first_ns = request.arrival_ns
        self._last_ns = max(self._last_ns, last_ns)
        ttft_ns, level = first_ns - request.arrival_ns, self._level
        self._num_good += ttft_ns <= level.ttft_ms * 1e6 and worst_itl_ns <= level.itl_ms * 1e6

    def result(self) -> RunFigures:
        seconds = (self._last_ns - (self._first_ns or 0)) / 1e9
        per_s = 1 / seconds if seconds else 0.0
        return RunFigures(
            num_requests=self.num_finished, num_steps=self.num_steps, seconds=seconds,
            ttft_ms=_spread(self.ttft), itl_ms=_spread(self.itl), e2e_ms=_spread(self.e2e),
            requests_per_s=self.num_finished * per_s,
            output_tokens_per_s=self._num_output_tokens * per_s,
            prefill_tokens_per_s=self._num_prefill_tokens * per_s,
            hit_share=self._num_hit_tokens / max(1, self._num_prompt_tokens),
            num_preemptions=self._num_preemptions,
            goodput_per_s=self._num_good * per_s,
        )  # fmt: skip


def _spread(samples: Distribution) -> Spread:
    return Spread(*(value / 1e6 for value in samples.percentiles(*RANKS, 100)))


def flat(figures: RunFigures) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name in ("ttft", "itl", "e2e"):
        spread: Spread = getattr(figures, f"{name}_ms")
        found |= {f"{name}_p{rank}_ms": getattr(spread, f"p{rank}") for rank in RANKS}
    return found | {name: getattr(figures, name) for name in _RATES}
