"""`Comparison`: the figures of two runs side by side. It keeps no reference to their `Side`s.

A is the baseline run, and B is compared with it: a ratio is B / A, a change is B - A.
"""

from typing import Literal, NamedTuple

from stepscope.engine.protocol.wire import EngineInfo, KnobValue
from stepscope.recordings.attribution.causes import Cause
from stepscope.recordings.compare.figures import ComparedFigure, compared_figures
from stepscope.recordings.compare.load import LoadDifference, load_of
from stepscope.recordings.compare.side.requests import (
    Matched,
    lived_in_both,
    matched,
    were_sent_twice,
)  # fmt: skip
from stepscope.recordings.compare.side.side import Kind, Side
from stepscope.recordings.state.series.latency import SLO

# Fields of `EngineInfo` that may change performance, unlike names and addresses.
_FIELDS = (
    *("model", "num_parameters", "dtype", "device", "implementation", "attention_backend"),
    *("block_size", "num_blocks", "max_model_len", "overlap", "software_version"),
)
_CAPACITIES = {"max_num_batched_tokens": "token budget at most", "max_num_seqs": "seats at most"}


class SettingDifference(NamedTuple):
    """A knob or engine property that differs: all its values in each run, in order."""

    name: str
    a: tuple[KnobValue, ...]
    b: tuple[KnobValue, ...]
    is_knob: bool


def differing_settings(a: Side, b: Side) -> list[SettingDifference]:
    """Differing knobs, then engine properties. A setting unknown on one side is left out."""
    names = [name for name in a.knob_values if name in b.knob_values]
    found = [
        SettingDifference(name, tuple(a.knob_values[name]), tuple(b.knob_values[name]), True)
        for name in names
    ]
    if a.info is not None and b.info is not None:
        for field, label in {**{name: name for name in _FIELDS}, **_CAPACITIES}.items():
            found.append(
                SettingDifference(label, _values(a.info, field), _values(b.info, field), False)
            )
    if a.workload is not None and b.workload is not None:
        found.append(SettingDifference("workload", (a.workload,), (b.workload,), False))
    return [each for each in found if each.a and each.b and each.a != each.b]


def _values(info: EngineInfo, field: str) -> tuple[KnobValue, ...]:
    value: KnobValue | None = getattr(info, field)
    return () if value is None else (value,)


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
    """The result of comparing two runs, as far as they were read.

    Attributes:
        causes: causes of waits longer than the service level, the most costly first.
        is_one_session: whether both runs are parts of one session, so that their lengths may
            differ. Two parts in which one engine was sent the same requests count as two sessions.
    """

    names: tuple[str, str]
    slo: SLO
    figures: list[ComparedFigure]
    settings: list[SettingDifference]
    causes: list[ComparedCause]
    works: tuple[SideWork, SideWork]
    requests: Matched
    percentile_error: float  # by which share of itself a percentile may be too small
    num_unlisted: int  # number of requests beyond those that the `Side`s keep
    is_one_session: bool
    load: LoadDifference  # how the loads of the two runs differ

    @property
    def different_work(self) -> str | None:
        """How the load differs, if by more than chance: then only some figures have a winner."""
        return self.load.other_work

    def figure(self, key: str) -> ComparedFigure:
        return next(figure for figure in self.figures if figure.key == key)

    def names_winner(self, side: Literal["a", "b"]) -> bool:
        """Whether a run can be judged: the loads are alike, or it is better in some figure."""
        return self.different_work is None or bool(self.better(side))

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
    keys = {**a.cause_ns, **b.cause_ns}
    shares = [
        ComparedCause(
            kind,
            cause,
            a.cause_ns.get((kind, cause), 0),
            b.cause_ns.get((kind, cause), 0),
            a.num_late.get((kind, cause), 0),
            b.num_late.get((kind, cause), 0),
        )
        for kind, cause in keys
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
