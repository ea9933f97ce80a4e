"""Only if two runs were offered the same work may one of them be called better."""

import random
from collections.abc import Iterable

from stepscope.engine.protocol import wire
from stepscope.recordings.compare.load import LoadDifference, load_of
from stepscope.recordings.compare.side.requests import RequestRun
from stepscope.recordings.compare.side.side import Side
from stepscope.recordings.state.series.latency import SLO
from stepscope.recordings.state.session import SessionState
from tests.support.sessions.history_steps import step

SLO_ = SLO(ttft_ms=500.0, itl_ms=30.0)


def asked(
    arrivals: Iterable[float],
    name: str = "run",
    *,
    seconds: float = 60.0,
    num_prompt: int = 100,
    max_tokens: int = 64,
    took_s: float = 1.0,
    num_out: int | None = None,
    num_queued: int = 0,
    cached: float | None = None,
    kv: wire.KVCounts | None = None,
    **knobs: wire.KnobValue,
) -> Side:
    """A side that got requests at the given times."""
    state = SessionState(knobs=knobs)
    state.kv = kv
    for number in range(num_queued):
        state.requests[-1 - number] = wire.RequestView(
            request_id=-1 - number, client_id="", status="waiting", arrival_ns=0,
            num_prompt_tokens=num_prompt, max_tokens=max_tokens,
        )  # fmt: skip
    side = Side(name, SLO_, state)
    side.apply(step(0, [], schedule_start_ns=0, tokens_ns=round(seconds * 1e9)))
    for number, arrival in enumerate(arrivals):
        run = RequestRun(number, "", num_prompt, round(arrival * 1e9), max_tokens=max_tokens)
        if arrival + took_s <= seconds:
            run.end_ns, run.has_all = round((arrival + took_s) * 1e9), True
            run.num_output_tokens = max_tokens if num_out is None else num_out
        run.num_cached_tokens = None if cached is None else round(cached * num_prompt)
        side.requests[number] = run
    return side


def evenly(number: int, seconds: float) -> list[float]:
    return [place * seconds / number for place in range(number)]


def test_the_load_is_judged_by_requests_sent_not_by_work_done() -> None:
    """For each kind of load: a real difference, and one that only a slower engine causes."""

    def load(a: Side, b: Side, *, is_one_session: bool = False) -> LoadDifference:
        return load_of(a, b, is_one_session=is_one_session)

    def told(a: Side, b: Side, *, is_one_session: bool = False) -> str | None:
        return load(a, b, is_one_session=is_one_session).other_work

    usual = asked(evenly(60, 50.0))
    alike = {
        "slower": asked(evenly(60, 50.0), took_s=5.0),
        "cut off before most had ended": asked(evenly(60, 50.0), took_s=40.0),
        "twice as long at the same rate": asked(evenly(144, 118.0), seconds=120.0),
        "clients that wait for their answers": asked(evenly(60, 100.0), seconds=110.0, took_s=2.0),
    }
    for what, other in alike.items():
        assert told(usual, other) is None, what
        assert told(other, usual) is None, what
    others = {
        "requests/s 1.0→2.0 (+100%), prompt tok/s 100→200 (+100%), output": asked(
            evenly(120, 50.0)
        ),
        "prompt tok/s 100→200 (+100%)": asked(evenly(60, 50.0), num_prompt=200),
        "output tok/s 64→128 (+100%)": asked(evenly(60, 50.0), max_tokens=128),
        "output tok/s 64→8 (-88%)": asked(evenly(60, 50.0), num_out=8),
        "within 49.2→4.9 s": asked(evenly(60, 5.0), seconds=20.0),
    }
    for what, other in others.items():
        assert what in (told(usual, other) or ""), what
        assert told(other, usual) is not None, what
    # Parts of one session: what came, by the second, and what the first part left to the second.
    draw = random.Random(4)
    times = [draw.uniform(0, 60) for _ in range(132)]
    some, more = asked(times[:60]), asked(times[60:])
    assert told(some, more, is_one_session=True) is None  # 1.0 and 1.2 a second are chance
    queue = told(some, asked(times[60:], num_queued=40), is_one_session=True)
    assert (queue or "").endswith("waiting at the start 0→40")
    assert told(asked([]), asked([]), is_one_session=True) is None
    going = asked([]), asked([], num_queued=20)
    assert "requests at a time 0.0→20.0" in (told(*going, is_one_session=True) or "")


def test_hits_of_a_prefilled_cache_are_a_load_difference_but_a_runs_own_hits_are_not() -> None:
    """The same requests sent twice: the second run computes nothing of their prompts."""
    empty = wire.KVCounts(used=0, cached=0, empty=99, evicted=0)
    filled = wire.KVCounts(used=0, cached=70, empty=29, evicted=0)
    times = evenly(60, 50.0)
    first = asked(times, cached=0.05, kv=empty)
    again = asked(times, cached=0.98, kv=filled)
    told = load_of(first, again, is_one_session=False)
    assert told.other_work == "5%→98% of the prompts came from the prefix cache"
    assert not told.is_same
    assert told.more_a > 10
    assert told.more_b == 1.0  # the side that computed more may still be better
    # Of other requests at the same rate it is other work as well, and it stands beside the rates.
    others = load_of(first, asked(evenly(120, 50.0), cached=0.98, kv=filled), is_one_session=False)
    assert "requests/s" in (others.other_work or "")
    assert "prefix cache" in (others.other_work or "")
    # Hits that a run made of its own prompts, in a cache that was empty, are what is compared.
    own = asked(times, cached=0.6, kv=empty)
    assert load_of(first, own, is_one_session=False).is_same
    # So are those that the setting brought.
    without = asked(times, cached=0.05, kv=empty, enable_prefix_caching=False)
    with_cache = asked(times, cached=0.98, kv=filled, enable_prefix_caching=True)
    assert load_of(without, with_cache, is_one_session=False).is_same
    # As much from the cache on both sides is the same work; what nobody tells is no difference.
    warm = asked(times, cached=0.97, kv=filled)
    assert load_of(asked(times, cached=0.98, kv=filled), warm, is_one_session=False).is_same
    assert load_of(asked(times), warm, is_one_session=False).is_same
