"""`stepscope explain`: a table, a JSON document, and a one-line error when it cannot."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.protocol.wire import Arrived, RowFlag, StepRecord
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.sessions.seek_sessions import record


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded session of chats beside documents under a budget that is too large."""
    knobs = Knobs(max_num_batched_tokens=1024, max_num_seqs=16)
    workload = SimulatedWorkload(rate=8.0, document_tokens=2500, output_tokens=90)
    messages = simulate(seed=3, num_steps=500, knobs=knobs, workload=workload, num_blocks=512)
    return record(tmp_path_factory.mktemp("explain") / "session.mcap", messages)


@pytest.fixture
def run(stepscope: Callable[..., Any]) -> Callable[..., Any]:
    return partial(stepscope, "explain")


@pytest.fixture
def document(run: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    def document(*arguments: str) -> dict[str, Any]:
        done = run(*arguments, "--json")
        assert done.exit_code == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return document


def test_the_json_of_explain_holds_every_late_token_with_cause_times_that_add_up(
    session: Path, document: Callable[..., Any]
) -> None:
    found = document(str(session), "--slo-itl", "30ms", "--slo-ttft", "0.1s")
    assert found["num_steps"] == 500
    assert (found["itl"]["bound_ms"], found["ttft"]["bound_ms"]) == (30, 100)
    late = found["late"]
    assert {each["kind"] for each in late} == {"ITL", "TTFT"}
    for each in late:
        assert each["ms"] > (30 if each["kind"] == "ITL" else 100)
        assert sum(piece["ms"] for piece in each["pieces"]) == pytest.approx(each["ms"])
    assert sum(cause["num_late"] for cause in found["causes"]) == len(late)
    assert found["itl"]["num_late"] + found["ttft"]["num_late"] == len(late)
    shared = next(each for each in late if each["cause"] == "prefill")
    piece = max(shared["pieces"], key=lambda piece: piece["ms"])
    assert piece["num_tokens"] > 100
    assert piece["request_id"] != shared["request_id"]


def test_the_tables_of_explain_begin_with_the_longest_wait_and_count_the_rest(
    session: Path, run: Callable[..., Any], document: Callable[..., Any]
) -> None:
    options = (str(session), "--slo-itl", "30ms", "--slo-ttft", "100ms")
    said = run(*options, "--limit", "3").stdout
    assert "longer than 30.0 ms (--slo-itl)" in said
    everything = run(*options, "--limit", "0").stdout
    for kind, title in (("ITL", "late gaps between tokens"), ("TTFT", "late first tokens")):
        late = [each for each in document(*options)["late"] if each["kind"] == kind]
        title = f"{title} ({kind}), the longest first\n"
        rows = said.partition(title)[2].splitlines()[1:5]
        took = [float(re.search(r"([\d,.]+) ms", row)[1].replace(",", "")) for row in rows[:3]]
        assert took == sorted(took, reverse=True)
        assert took[0] == max(round(each["ms"], 1) for each in late)
        shown = sum(1 + int((re.search(r"#\d+ \+(\d+)", row) or [0, 0])[1]) for row in rows[:3])
        assert rows[3] == f"and {len(late) - shown:,} more: --limit 0 shows all"
        assert title in everything
    assert everything.count("prefill tokens of r") >= 3
    assert "--limit 0" not in everything
    assert said.endswith(f"\n'stepscope tune {session}' names the bottleneck\n")


def test_explain_names_the_step_that_stalled_streams(
    session: Path, run: Callable[..., Any], document: Callable[..., Any]
) -> None:
    options = (str(session), "--slo-itl", "30ms", "--slo-ttft", "1ms")
    gaps = [each for each in document(*options)["late"] if each["kind"] == "ITL"]
    longest = max(gaps, key=lambda each: each["ms"])
    streams = sum(each["step"] == longest["step"] for each in gaps)
    said = run(*options).stdout
    assert f"the longest: {longest['ms']:,.1f} ms at step {longest['step']:,} (" in said
    assert f"), which held up {streams:,} stream" in said


def test_explain_shows_the_kind_of_cuda_graph_that_steps_of_each_size_ran_in(
    run: Callable[..., Any], document: Callable[..., Any]
) -> None:
    graphs = document("h200")["graphs"]
    assert [(each["kind"], each["least_tokens"], each["most_tokens"]) for each in graphs] == [
        ("full", 1, 1), ("full", 9, 9), ("full", 17, 25), ("full", 33, 64), ("full", 65, 65),
        ("piecewise", 281, 281), ("piecewise", 576, 576), ("piecewise", 2048, 2048),
    ]  # fmt: skip
    assert sum(each["num_steps"] for each in graphs) == 264
    assert sum(each["share"] for each in graphs) == pytest.approx(1)
    said = run("h200").stdout
    assert "CUDA graph    tokens  steps  share  step time p50\n" in said
    assert "piecewise      2,048     40  15.2%        64.6 ms\n" in said
    assert "CUDA graph" not in run("freeze").stdout


def test_explain_says_what_limited_the_steps_and_gives_advice(
    session: Path, run: Callable[..., Any], document: Callable[..., Any]
) -> None:
    found = document(str(session))
    assert (found["itl"]["bound_ms"], found["ttft"]["bound_ms"]) == (50.0, 500.0)  # the defaults
    assert sum(found["limits"].values()) == pytest.approx(1)
    lines = run(str(session)).stdout.splitlines()
    (limits,) = [line for line in lines if line.startswith("limited by: ")]
    of_time = found["limits_of_time"]
    assert sum(of_time.values()) == pytest.approx(1)
    largest = max(of_time, key=of_time.get)
    shares = f"{of_time[largest]:.0%} of the time in steps ({found['limits'][largest]:.0%} of steps"
    assert shares in limits
    assert sum(line.startswith("advice: ") for line in lines) == len(found["advice"])


def test_explain_can_be_limited_to_one_request(
    session: Path, run: Callable[..., Any], document: Callable[..., Any]
) -> None:
    some = document(str(session), "--slo-itl", "30ms")["late"][0]["request_id"]
    for name in (f"r{some}", str(some)):
        late = document(str(session), "--slo-itl", "30ms", "--request", name)["late"]
        assert late
        assert {each["request_id"] for each in late} == {some}
    options = (str(session), "--slo-itl", "30ms", "--slo-ttft", "100ms")
    whole, alone = document(*options), document(*options, "--request", f"r{some}")
    assert alone["late"] == [each for each in whole["late"] if each["request_id"] == some]
    assert sum(cause["num_late"] for cause in alone["causes"]) == len(alone["late"])
    assert alone["itl"]["num_late"] + alone["ttft"]["num_late"] == len(alone["late"])
    assert alone["ttft"]["num_waits"] == 1
    assert alone["num_steps"] == whole["num_steps"]
    shown = run(*options, "--request", f"r{some}").stdout
    assert f"first tokens of r{some}: " in shown


def test_explain_counts_requests_without_any_token(
    tmp_path: Path, run: Callable[..., Any], document: Callable[..., Any]
) -> None:
    workload = SimulatedWorkload(rate=40.0, output_tokens=400)
    messages = simulate(seed=3, num_steps=60, knobs=Knobs(max_num_seqs=2), workload=workload)
    steps = [message for _, message in messages if isinstance(message, StepRecord)]
    arrived = {
        event.request_id: event.time_ns
        for _, message in messages
        for event in getattr(message, "events", ())
        if isinstance(event, Arrived)
    }
    for step in steps:
        for row in step.batch or ():
            if row.flags & RowFlag.LAST_CHUNK:
                arrived.pop(row.request_id, None)
    assert len(arrived) > 5
    path = record(tmp_path / "crash.mcap", messages)
    longest_ms = (steps[-1].tokens_ns - min(arrived.values())) / 1e6
    found = document(str(path))["never_served"]
    assert found["num_requests"] == len(arrived)
    assert found["longest_ms"] == pytest.approx(longest_ms, rel=0.05)
    table = run(str(path), "--slo-itl", "60s", "--slo-ttft", "60s").stdout
    assert f"no token at all: {len(arrived)} requests by the end; the longest had wai" in table
    assert table.endswith("no token that came was late\n")
    one = document(str(path), "--request", f"r{min(arrived)}")["never_served"]
    assert one["num_requests"] == 1


def test_explain_says_how_many_requests_had_late_tokens(
    session: Path, run: Callable[..., Any], document: Callable[..., Any]
) -> None:
    options = (str(session), "--slo-itl", "30ms", "--slo-ttft", "100ms")
    found = document(*options)
    late = {each["request_id"] for each in found["late"]}
    with_late_gaps = {each["request_id"] for each in found["late"] if each["kind"] == "ITL"}
    number, only_first = found["requests"]["num_requests"], len(late - with_late_gaps)
    assert number > len(late) > only_first > 0
    assert found["requests"] == {
        "num_requests": number,
        "num_late": len(late),
        "num_only_first": only_first,
    }
    share = f"{len(late)} of {number} ({len(late) / number:.2%})"
    first = f"{only_first} only waited long for the first"
    assert f"\nrequests with late tokens: {share}; {first}\n" in run(*options).stdout
    alone = document(*options, "--request", f"r{min(late)}")["requests"]
    assert (alone["num_requests"], alone["num_late"]) == (1, 1)
    assert "requests with late tokens" not in run(*options, "--request", f"r{min(late)}").stdout
