"""Figures by name are equal from memory, from a file and by hand; bounds can be set on them."""

import re
from collections import defaultdict
from itertools import pairwise

import pytest

from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.protocol.wire import Arrived, Finished, RowFlag, StepRecord, Telemetry
from stepscope.recordings.figures import FIGURES, BoundError, parse_bound
from stepscope.recordings.history.history import History
from stepscope.recordings.state.latency import SLO
from tests.support.engines.cost_model import CostModel
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.sessions.history_steps import history_of

LEVELS = SLO(ttft_ms=600.0, itl_ms=40.0)
Messages = list[tuple[int, Telemetry]]


@pytest.fixture(scope="module")
def session() -> Messages:
    return simulate(
        seed=5, num_steps=700, knobs=Knobs(max_num_batched_tokens=512, max_num_seqs=16),
        workload=SimulatedWorkload(rate=8.0, document_share=0.2, document_tokens=2000),
        cost=CostModel(floor_ms=12.0, token_us=60.0),
    )  # fmt: skip


def kept_by_hand(messages: Messages, slo: SLO) -> tuple[int, int]:
    """Finished requests, and those of them that kept both service levels, token by token."""
    arrival: dict[int, int] = {}
    tokens: dict[int, list[int]] = defaultdict(list)
    finished: set[int] = set()
    for _, message in messages:
        for event in getattr(message, "events", ()):
            if isinstance(event, Arrived):
                arrival[event.request_id] = event.time_ns
            elif isinstance(event, Finished):
                finished.add(event.request_id)
        if isinstance(message, StepRecord):
            for row in message.batch or ():
                if row.flags & RowFlag.LAST_CHUNK:
                    tokens[row.request_id].append(message.tokens_ns)
    kept = 0
    for each in finished:
        times = tokens[each]
        waits = [after - before for before, after in pairwise(times)]
        is_first_in_time = times[0] - arrival[each] <= slo.ttft_ms * 1e6
        kept += is_first_in_time and max(waits, default=0) <= slo.itl_ms * 1e6
    return len(finished), kept


def test_goodput_under_a_raised_level_is_as_if_it_had_always_applied(session: Messages) -> None:
    history, higher = history_of(session, LEVELS), SLO(ttft_ms=900.0, itl_ms=60.0)
    history.set_slo(higher)
    num_finished, num_kept = kept_by_hand(session, higher)
    assert history.windows.figures(None, None)["goodput"] == pytest.approx(num_kept / num_finished)


def test_goodput_under_a_lowered_level_counts_only_known_waits(session: Messages) -> None:
    history = history_of(session, LEVELS)
    history.set_slo(SLO(ttft_ms=600.0, itl_ms=20.0))
    late = history.windows.figures(None, None)["goodput"]
    assert late == 0  # only requests with a known longer ITL or TTFT are judged


def test_without_a_step_all_figures_are_unknown() -> None:
    found = History(LEVELS).windows.figures()
    assert set(found) == set(FIGURES)
    assert {name for name, value in found.items() if value is not None} == {"steps", "seconds"}


@pytest.mark.parametrize(
    ("text", "name", "relation", "value"),
    [
        ("itl_p99 > 50ms", "itl_p99", ">", 50),
        ("itl_p99=50ms", "itl_p99", "=", 50),
        ("ttft_p95 >= 1.5 s", "ttft_p95", ">=", 1500),
        ("goodput<95%", "goodput", "<", 0.95),
        ("goodput < 0.95", "goodput", "<", 0.95),
        ("preemptions=0", "preemptions", "=", 0),
        ("out_tokens_per_s <= 1000", "out_tokens_per_s", "<=", 1000),
    ],
)
def test_a_bound_is_parsed_with_its_unit(text: str, name: str, relation: str, value: float) -> None:
    bound = parse_bound(text)
    assert (bound.figure.name, bound.relation) == (name, relation)
    assert bound.value == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected the name of a figure"),
        ("itl_p98 > 50ms", "no figure is called itl_p98; there is itl_p9"),
        ("itl_p99 ~ 50ms", "expected one of > >= < <= ="),
        ("itl_p99 > fast", "expected a number"),
        ("itl_p99 > 50%", "itl_p99 takes ms or s or us, got %"),
        ("goodput < 95", "write 95% or a number up to 1"),
        ("preemptions = 3 a minute", "nothing may follow the value, got 'a minute'"),
    ],
)
def test_an_invalid_bound_is_refused_with_what_was_expected(text: str, problem: str) -> None:
    with pytest.raises(BoundError, match=re.escape(problem)):
        parse_bound(text)


def test_a_bound_is_parsed_up_to_the_text_that_follows_it() -> None:
    text = "itl_p99 > 50ms for 30s"
    assert text[parse_bound(text, is_whole=False).end :] == " for 30s"
