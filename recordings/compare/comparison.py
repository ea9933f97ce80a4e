"""`Comparison`: the figures of two runs side by side. It keeps no reference to their `Side`s.

A is the baseline run, and B is compared with it: a ratio is B / A, a change is B - A.
`Comparer` reads two runs in turn, each through its `Feed`, and compares what it has read.
"""

import logging
import threading
import time
from typing import Literal, NamedTuple

from stepscope.engine.protocol.wire import KnobValue
from stepscope.recordings.attribution.causes import Cause
from stepscope.recordings.compare.feed import Feed
from stepscope.recordings.compare.figures import ComparedFigure, compared_figures
from stepscope.recordings.compare.load import LoadDifference, load_of
from stepscope.recordings.compare.side import Kind, Side
from stepscope.recordings.compare.side_requests import (
    Matched,
    lived_in_both,
    matched,
    were_sent_twice,
)  # fmt: skip
from stepscope.recordings.state.latency import SLO

# Fields of `EngineInfo` that may change performance, unlike names and addresses.
_NAMED = (
    *("model", "num_parameters", "dtype", "device", "implementation", "attention_backend"),
    *("block_size", "num_blocks", "max_model_len", "overlap", "software_version"),
)
_FIELDS = {name: name for name in _NAMED}  # and what people are told
_FIELDS |= {"max_num_batched_tokens": "token budget at most", "max_num_seqs": "seats at most"}


class SettingDifference(NamedTuple):
    """A knob or engine property that differs: all its values in each run, in order."""

    name: str
    a: tuple[KnobValue, ...]
    b: tuple[KnobValue, ...]
    is_knob: bool


def differing_settings(a: Side, b: Side) -> list[SettingDifference]:
    """Differing knobs, then engine properties. A setting unknown on one side is left out."""
    ours, theirs = _settings(a), _settings(b)
    return [
        SettingDifference(name, values, theirs[name, is_knob], is_knob)
        for (name, is_knob), values in ours.items()
        if theirs.get((name, is_knob), values) != values
    ]


def _settings(side: Side) -> dict[tuple[str, bool], tuple[KnobValue, ...]]:
    """The known values of knobs and of engine properties, by name and whether it is a knob."""
    found = {(name, True): tuple(each) for name, each in side.knob_values.items()}
    told = {label: getattr(side.info, name, None) for name, label in _FIELDS.items()}
    told["workload"] = side.workload
    return found | {(name, False): (each,) for name, each in told.items() if each is not None}


class ComparedCause(NamedTuple):
    """How much one cause contributed to late waits, in each of the two runs."""

    kind: Kind
    cause: Cause
    a_ns: int
    b_ns: int
    num_a: int  # late tokens with it as their largest cause
    num_b: int


class SideWork(NamedTuple):
    num_steps: int  # of records, if `sums_up`
    seconds: float
    num_requests: int | None
    num_arrived: int | None  # of them, during the run
    num_finished: int | None
    num_in_tokens: int | None
    num_out_tokens: int | None
    simulated: str | None  # source of the simulated step times; None if it really ran
    sums_up: bool  # whether its records are not of one step each


class Comparison(NamedTuple):
    """The result of comparing two runs, as far as they were read."""

    names: tuple[str, str]
    slo: SLO
    figures: list[ComparedFigure]
    settings: list[SettingDifference]
    causes: list[ComparedCause]  # of waits longer than the service level, the most costly first
    works: tuple[SideWork, SideWork]
    requests: Matched
    percentile_error: float  # by which share of itself a percentile may be too small
    num_unlisted: int  # number of requests beyond those that the `Side`s keep
    # Whether both are parts of one session, so that their lengths may differ. Two parts in which
    # one engine was sent the same requests count as two sessions.
    is_one_session: bool
    load: LoadDifference

    def figure(self, key: str) -> ComparedFigure:
        return next(figure for figure in self.figures if figure.key == key)

    def names_winner(self, side: Literal["a", "b"]) -> bool:
        """Whether a run can be judged: the loads are alike, or it is better in some figure."""
        return self.load.other_work is None or bool(self.better(side))

    def better(self, side: Literal["a", "b"]) -> list[ComparedFigure]:
        """The figures in which a run is better, in the order of `figures`."""
        return [figure for figure in self.figures if figure.verdict == side]


def compare(a: Side, b: Side) -> Comparison:
    """Compare what has been read of both runs. Call it from the thread that reads them."""
    for side in (a, b):
        side.settle()
    is_one_engine = (
        a.info is not None and b.info is not None and a.info.engine_id == b.info.engine_id
    )
    is_one_session = is_one_engine and not were_sent_twice(a.requests, b.requests)
    load = load_of(a, b, is_one_session=is_one_session)
    requests = (lived_in_both if is_one_session else matched)(a.requests, b.requests)
    return Comparison(
        (a.name, b.name), a.slo, compared_figures(a, b, load, is_one_session=is_one_session),
        differing_settings(a, b), _causes(a, b), (_work(a), _work(b)), requests,
        max(side.totals.waits.error for side in (a, b)), a.num_unlisted + b.num_unlisted,
        is_one_session, load,
    )  # fmt: skip


def _causes(a: Side, b: Side) -> list[ComparedCause]:
    shares = [
        ComparedCause(*key, a.cause_ns[key], b.cause_ns[key], a.num_late[key], b.num_late[key])
        for key in {**a.cause_ns, **b.cause_ns}
    ]
    return sorted(shares, key=lambda share: -max(share.a_ns, share.b_ns))


def _work(side: Side) -> SideWork:
    sums = side.sums()
    num_requests = len(side.requests) + side.num_unlisted
    return SideWork(
        sums.num_records, sums.seconds, num_requests or (None if sums.num_arrived is None else 0),
        sums.num_arrived, sums.num_finished, sums.num_in_tokens, sums.num_output_tokens,
        None if side.info is None else side.info.simulated,
        side.info is not None and side.info.totals_every_s is not None,
    )  # fmt: skip


log = logging.getLogger("stepscope.recordings")

_SLICE_S = 0.02  # seconds of reading at once, before other threads may run
_REST_S = 0.004
_FOLLOW_S = 0.2  # seconds between reads of a live session
_RENEW_S = 0.5  # least seconds between comparisons; `_SHARE` times their duration if longer
_SHARE = 20


class Comparer:
    """Reads and compares two runs. After `start`, a thread keeps the comparison up to date.

    `comparison`: the newest comparison; None before something of both runs was read.
    """

    def __init__(self, a: Feed, b: Feed) -> None:
        self.feeds = (a, b)
        self.comparison: Comparison | None = None
        self.version = 0  # grows with every new comparison
        self.error: str | None = None
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="comparison", daemon=True)
        self._is_caught_up = False  # all that exists was read and compared

    # From any thread

    @property
    def sides(self) -> tuple[Side, Side] | None:
        """The two runs as read so far; None before something of both was read."""
        a, b = (feed.side for feed in self.feeds)
        return None if a is None or b is None else (a, b)

    @property
    def is_reading(self) -> bool:
        """Whether there are messages that have not been read and compared yet."""
        return self._thread.is_alive() and not self._is_caught_up

    @property
    def was_cancelled(self) -> bool:
        """Whether `cancel` stopped it before it had read everything."""
        return self._is_stopped.is_set() and not self._is_caught_up

    @property
    def notes(self) -> list[str]:
        """Lines for people on what is missing or went wrong, one for each problem."""
        found = [feed.note for feed in self.feeds] + [self.error]
        return list(dict.fromkeys(note for note in found if note))

    def start(self) -> None:
        self._thread.start()

    def cancel(self) -> None:
        """Stop reading, but keep what was read. Does not wait for the thread."""
        self._is_stopped.set()

    def stop(self) -> None:
        """End the thread and close both feeds."""
        self.cancel()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        for feed in self.feeds:
            feed.close()

    # Reading

    def read_some(self) -> bool:
        """Read from each run for a short time. Returns whether there was anything to read."""
        taken = [feed.read(time.monotonic() + _SLICE_S) for feed in self.feeds]
        return any(taken)

    def renew(self) -> Comparison:
        """Compare what has been read so far. Only the reading thread may call it."""
        assert self.sides is not None
        self.comparison = compare(*self.sides)
        self.version += 1
        return self.comparison

    def _run(self) -> None:
        try:
            self._follow()
        except Exception as error:
            log.exception("comparing failed")
            self.error = f"comparing failed, see the log: {error!r}"

    def _follow(self) -> None:
        due_s, is_stale = 0.0, False  # stale: the comparison lacks something that was read
        while not self._is_stopped.is_set():
            taken = self.read_some()
            has_more = any(not feed.is_done and feed.share is not None for feed in self.feeds)
            is_stale = is_stale or taken
            now_s = time.monotonic()
            if is_stale and self.sides is not None and (now_s >= due_s or not taken):
                self.renew()
                is_stale = False
                took_s = time.monotonic() - now_s
                due_s = now_s + max(_RENEW_S, _SHARE * took_s)
            if has_more:
                self._is_caught_up = False
            elif not is_stale:
                self._is_caught_up = True
            if not taken and all(feed.is_done for feed in self.feeds):
                return
            self._is_stopped.wait(_REST_S if taken else _FOLLOW_S)
        if is_stale and self.sides is not None:
            self.renew()
