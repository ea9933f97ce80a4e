"""A client's result beside the recording of its engine: who is who, whose clock, whose fault."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.importing.client_match import (
    ClientMatch,
    ServedRequest,
    client_match,
    client_waits,
    served_requests,
    worst_marks,
)
from stepscope.recordings.importing.imported import client_result
from stepscope.recordings.importing.source import ClientRequest, ForeignSession
from stepscope.recordings.replay.replay import ReplaySource
from stepscope.recordings.state.latency import SLO

SAMPLES = Path(__file__).parent / "samples"
SERVED, RESULT = SAMPLES / "vllm_served.mcap", SAMPLES / "vllm_served.json"
NUMBER = 60
HOUR_NS = 3600 * 10**9


@pytest.fixture
def recording() -> Iterator[Recording]:
    with Recording(SERVED) as opened:
        yield opened


@pytest.fixture
def result() -> ForeignSession:
    return client_result(RESULT)


def without_ids(session: ForeignSession, shift_ns: int = 0) -> ForeignSession:
    """The session as a client tells it that has no ids, and whose clock is ahead."""
    requests = deepcopy(list(session.requests))
    for each in requests:
        each.client_id = ""
        each.start_ns += shift_ns
        each.tokens_ns = [token_ns + shift_ns for token_ns in each.tokens_ns]
    return session._replace(requests=requests)


def numbers(match: ClientMatch, session: ForeignSession) -> list[tuple[int, int]]:
    """The place of each request in the result, and the number that vLLM's client gave it."""
    place = {id(each): number for number, each in enumerate(session.requests)}
    return [(place[id(a)], int(b.client_id.split("-")[3])) for a, b in match.pairs]


def seen_by_client(engine: ServedRequest, before_ns: int, after_ns: int, clock_ns: int) -> Any:
    """A request by its client's clock: sent some time before it arrived, read some time after."""
    times_ns = [time_ns + after_ns - clock_ns for time_ns in engine.times_ns]
    lengths = {"num_prompt": engine.num_prompt, "num_output": engine.num_output}
    start_ns = engine.arrival_ns - before_ns - clock_ns
    return ClientRequest(start_ns=start_ns, end_ns=times_ns[-1], tokens_ns=times_ns, **lengths)


def test_requests_found_by_id_wait_as_told(recording: Recording, result: ForeignSession) -> None:
    match = client_match(result, recording)
    assert (match.by, len(match.pairs), match.num_requests) == ("request id", NUMBER, NUMBER)
    assert (match.num_unlike, match.num_unfit, match.apart_ns) == (0, 0, 0)
    assert all(a == b for a, b in numbers(match, result))
    told = json.loads(RESULT.read_text("utf-8"))
    found, gaps = (of.waits for of in client_waits(match))
    ours = {each.pair.client.client_id: each.ns / 1e9 for each in found}
    assert ours == {f"-{n}": pytest.approx(each) for n, each in enumerate(told["ttfts"])}
    assert median(each.ns for each in found) / 1e6 == pytest.approx(told["median_ttft_ms"])
    assert sum(each.ns for each in gaps) / len(gaps) / 1e6 == pytest.approx(told["mean_itl_ms"])
    assert len(gaps) == sum(map(len, told["itls"]))
    assert all(sum(each.parts_ns) == each.ns for each in (*found, *gaps))
    ordered = sorted(each.ns for each in found)
    ranks = [client_waits(match)[0].at(rank).ns for rank in (1, 50, 95, 99, 100)]
    assert ranks == [ordered[place] for place in (0, 29, 56, 59, 59)]
    # Both clocks are one: no request came before it was sent, no token before it was made.
    assert (match.offset_ns, match.error_ns) == (0, 0)
    assert min(min(each.parts_ns) for each in found) > 0


@pytest.mark.parametrize("shift_ns", [0, 77 * HOUR_NS, -5_000_000])
def test_without_ids_they_are_found_by_time_and_lengths_on_any_clock(
    recording: Recording, result: ForeignSession, shift_ns: int
) -> None:
    session = without_ids(result, shift_ns)
    match = client_match(session, recording)
    assert (match.by, len(match.pairs)) == ("time and lengths", NUMBER)
    assert all(a == b for a, b in numbers(match, session))
    assert match.offset_ns == pytest.approx(-shift_ns, abs=match.error_ns)
    assert match.error_ns < 2_000_000
    assert match.apart_ns == pytest.approx(abs(shift_ns), rel=1e-3) or abs(shift_ns) < HOUR_NS
    assert all(sum(each.parts_ns) == each.ns for each in client_waits(match)[0].waits)


def test_requests_without_starts_match_in_order(
    recording: Recording, result: ForeignSession
) -> None:
    session = without_ids(result)._replace(has_starts=False)
    match = client_match(session, recording)
    assert (match.by, match.offset_ns) == ("order and lengths", None)
    assert all(a == b for a, b in numbers(match, session))
    exact = client_waits(client_match(result, recording))[0].waits
    known = {each.pair.engine.request_id: each.parts_ns for each in exact}
    for each in client_waits(match)[0].waits:
        before_ns, *inside, after_ns = known[each.pair.engine.request_id]
        assert each.parts_ns == (*inside, before_ns + after_ns)


def test_requests_of_sglangs_client_are_matched_in_order() -> None:
    session = client_result(SAMPLES / "sglang_served.jsonl")
    told = json.loads((SAMPLES / "sglang_served.jsonl").read_text("utf-8"))
    with Recording(SAMPLES / "sglang_served.mcap") as recording:
        match = client_match(session, recording)
        served = [each.request_id for each in served_requests(recording)]
    assert (match.by, match.num_requests, match.offset_ns) == ("order and lengths", 21, None)
    place = {id(each): number for number, each in enumerate(session.requests)}
    found = {place[id(a)]: served.index(b.request_id) for a, b in match.pairs}
    assert found == {number: number + 1 for number in range(21)}  # it warms up with one more
    assert all(a.num_output == b.num_output and b.is_whole for a, b in match.pairs)
    first, gaps = (of.waits for of in client_waits(match))
    assert sum(each.ns for each in first) / 21e6 == pytest.approx(told["mean_ttft_ms"])
    assert sum(each.ns for each in gaps) / len(gaps) / 1e6 == pytest.approx(told["mean_itl_ms"])
    assert min(min(each.parts_ns) for each in first) > 0


@pytest.mark.parametrize("clock_ns", [0, 12 * HOUR_NS])
def test_time_before_and_after_the_engine_is_told_apart(
    recording: Recording, result: ForeignSession, clock_ns: int
) -> None:
    engines = served_requests(recording)
    delays = [(3_000_000 + 7_000 * n, 2_000_000 + 11_000 * (n % 9)) for n in range(len(engines))]
    delays[7] = (400_000_000, 2_000_000)  # its front end was slow
    seen = [seen_by_client(e, *delay, clock_ns) for e, delay in zip(engines, delays, strict=True)]
    match = client_match(result._replace(requests=seen[::-1]), recording)
    assert len(match.pairs) == len(engines)
    assert match.offset_ns == pytest.approx(clock_ns, abs=match.error_ns)
    told = {each.pair.engine.request_id: each.parts_ns for each in client_waits(match)[0].waits}
    for engine, (before_ns, after_ns) in zip(engines, delays, strict=True):
        first, *_, last = told[engine.request_id]
        assert first == pytest.approx(before_ns, abs=match.error_ns)
        assert last == pytest.approx(after_ns, abs=match.error_ns)
    slowest = client_waits(match)[0].worst(1)[0]
    assert slowest.pair.engine.request_id == engines[7].request_id


def test_other_lengths_and_requests_are_told(recording: Recording, result: ForeignSession) -> None:
    session = without_ids(result)
    for each in session.requests:
        each.num_prompt += 11  # a chat template that it does not know
    match = client_match(session, recording)
    assert match.num_unlike == len(match.pairs) == NUMBER
    assert all(a == b for a, b in numbers(match, session))
    for number, each in enumerate(session.requests):
        each.start_ns += number**2 * 10**9
        each.tokens_ns = [token_ns + number**2 * 10**9 for token_ns in each.tokens_ns]
    with pytest.raises(RecordingError, match="match fewer than half of its 60"):
        client_match(session, recording)


def test_event_keys_go_to_the_steps_where_the_client_waited_longest(result: ForeignSession) -> None:
    recording = Recording(SERVED)
    match = client_match(result, recording)
    marks = worst_marks(match, "vllm bench serve")
    slowest = client_waits(match)[0].waits[0]
    assert (marks[0].step, len(marks)) == (slowest.step, 10)
    assert f"client's TTFT {slowest.ns / 1e6:,.1f} ms of r" in marks[0].text
    source = ReplaySource(recording, playing=False, marks=marks)
    with ExitStack() as stack:
        stack.callback(source.stop)
        source.start()
        assert source.file_index.wait()
        steps, seen = sorted({each.step for each in marks}), [-1]
        while (event := source.file_index.next(seen[-1], 1, {"mark"}, SLO())) is not None:
            seen.append(event.step)
        assert seen == [-1, *steps]
        source.seek(steps[3])
        assert source.wait()
        assert {each.step for each in source.history.marks} == set(steps[:4])


def test_compare_prints_the_split_and_writes_it_as_json(stepscope: Any) -> None:
    arguments = ("compare", str(SERVED), "--client", str(RESULT))
    text = stepscope(*arguments).stdout
    assert "60 of 60 requests found by request id" in text
    assert "client and engine read the same one" in text
    found = json.loads(stepscope(*arguments, "--json").stdout)
    told = json.loads(RESULT.read_text("utf-8"))
    named = {each["rank"]: each for each in found["TTFT"]}
    assert named["mean"]["client"] == pytest.approx(told["mean_ttft_ms"])
    assert named["p50"]["client"] == pytest.approx(told["median_ttft_ms"], rel=0.05)
    for each in (*found["requests"], *found["TTFT"]):
        parts = (each[name] for name in ("front end", "queue", "prefill", "delivery"))
        assert sum(parts) == pytest.approx(each["client"])
    for each in found["ITL"]:
        assert each["decode"] + each["delivery"] == pytest.approx(each["client"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((SERVED, "--client", "missing.json"), "missing.json: No such file"),
        ((SERVED, "--client", SERVED), "expected the result of a load generator, got another"),
        ((RESULT, "--client", RESULT), "does not tell the requests of each step of an engine"),
        ((SERVED, SERVED, "--client", RESULT), "--client: leave out B, --mark and --output"),
    ],
)
def test_what_cannot_be_laid_beside_is_said_in_one_line(
    stepscope: Any, arguments: Sequence[object], said: str
) -> None:
    answer = stepscope("compare", *map(str, arguments))
    assert answer.exit_code
    assert said in answer.stderr
    assert answer.stderr.count("\n") == 1
