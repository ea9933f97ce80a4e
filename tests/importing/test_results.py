"""A client's result is read as a session of its requests, with the figures that its tool gives."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stepscope.recordings.errors import RecordingError
from stepscope.recordings.importing.imported import client_result, imported

SAMPLES = Path(__file__).parent / "samples"
VLLM = SAMPLES / "vllm_bench_serve.json"
SGLANG = SAMPLES / "sglang_served.jsonl"
AIPERF = SAMPLES / "aiperf_profile_export.jsonl"
GUIDELLM = SAMPLES / "guidellm_report.json"
INFERENCE_PERF = SAMPLES / "inference_perf_requests.json"
_NAMES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2e"}  # the tool's, ours


def result() -> Any:
    return json.loads(VLLM.read_text("utf-8"))


def written(path: Path, *documents: object) -> Path:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in documents), "utf-8")
    return path


Stats = Callable[[Path], dict[str, Any]]


@pytest.fixture
def stats(stepscope: Any) -> Stats:
    return lambda path: json.loads(stepscope("stats", str(path), "--json").stdout)["figures"]


def test_figures_are_those_of_vllms_own_summary(stats: Stats) -> None:
    told, found = result(), stats(VLLM)
    # Of 101 requests these percentiles are values of single ones, in both ways of counting.
    for theirs, ours in _NAMES.items():
        for rank in (50, 95, 99):
            expected = pytest.approx(told[f"p{rank}_{theirs}_ms"], rel=2e-3)
            assert found[f"{ours}_p{rank}"] == expected, (theirs, rank)
    assert found["arrived"] == found["finished"] == told["completed"]
    seconds = found["seconds"]
    assert found["out_tokens_per_s"] * seconds == pytest.approx(told["total_output_tokens"])
    assert found["in_tokens_per_s"] * seconds == pytest.approx(told["total_input_tokens"])
    assert seconds == pytest.approx(told["duration"], rel=0.01)
    only_an_engine_knows = (
        "steps_per_s step_p50 preemptions recomputed_share evictions prefix_hit_rate kv_used busy "
        "budget_used mixed_steps limit_work"
    )
    assert {found[name] for name in only_an_engine_knows.split()} == {None}


def test_figures_of_sglangs_client_are_those_of_its_own_summary(stats: Stats) -> None:
    told, found = json.loads(SGLANG.read_text("utf-8")), stats(SGLANG)
    assert found["arrived"] == found["finished"] == told["completed"] == 21
    # Of 21 requests these percentiles are values of single ones, in both ways of counting.
    assert found["ttft_p50"] == pytest.approx(told["median_ttft_ms"])
    assert found["ttft_p95"] == pytest.approx(told["p95_ttft_ms"])
    assert found["itl_max"] == pytest.approx(1e3 * max(map(max, filter(None, told["itls"]))))
    assert found["itl_p50"] == pytest.approx(told["median_itl_ms"], rel=0.01)
    # Its request ends with the line after the last token, which it does not write down.
    assert found["e2e_p50"] == pytest.approx(told["median_e2e_latency_ms"], abs=1)
    assert found["tpot_p50"] == pytest.approx(told["median_tpot_ms"], abs=0.1)
    seconds = found["seconds"]
    assert seconds == pytest.approx(told["duration"], rel=0.05)
    assert found["out_tokens_per_s"] * seconds == pytest.approx(told["total_output_tokens"])
    spread = client_result(SGLANG)
    assert "no start times: requests are spread evenly" in (spread.note or "")
    apart_ns = {b.start_ns - a.start_ns for a, b in pairwise(spread.requests)}
    assert max(apart_ns) - min(apart_ns) <= 1


def test_guidellms_report_tells_all_but_single_gaps(tmp_path: Path, stats: Stats) -> None:
    report = json.loads(GUIDELLM.read_text("utf-8"))
    told, found = report["benchmarks"][0]["requests"]["successful"], stats(GUIDELLM)
    assert (found["finished"], found["itl_p50"]) == (len(told), None) == (4, None)
    assert found["ttft_max"] == pytest.approx(max(e["time_to_first_token_ms"] for e in told))
    tpot_ms = max(each["inter_token_latency_ms"] for each in told)
    assert found["tpot_max"] == pytest.approx(tpot_ms, rel=1e-3)
    assert found["e2e_max"] == pytest.approx(1e3 * max(each["request_latency"] for each in told))
    tokens = found["out_tokens_per_s"] * found["seconds"]
    assert tokens == pytest.approx(sum(each["output_tokens"] for each in told))
    report["benchmarks"].insert(0, {"requests": {}})
    said = imported(written(tmp_path / "benchmarks.json", report))[1]
    assert said == "benchmarks.json holds 2 benchmarks: the last one is shown"


def test_inference_perfs_requests_tell_each_chunk(stats: Stats) -> None:
    requests, found = json.loads(INFERENCE_PERF.read_text("utf-8")), stats(INFERENCE_PERF)
    answers = [each["info"]["response_metrics"] for each in requests]
    times_s = [each["chunk_times"] for each in answers]
    assert found["finished"] == len(requests) == 4
    first_s = [times[0] - each["start_time"] for times, each in zip(times_s, requests, strict=True)]
    assert found["ttft_max"] == pytest.approx(1e3 * max(first_s))
    gaps_s = [after - before for times in times_s for before, after in pairwise(times)]
    assert found["itl_max"] == pytest.approx(1e3 * max(gaps_s))
    lasted_s = max(each["end_time"] - each["start_time"] for each in requests)
    assert found["e2e_max"] == pytest.approx(1e3 * lasted_s)
    tokens = sum(each["output_tokens"] for each in answers)
    assert found["out_tokens_per_s"] * found["seconds"] == pytest.approx(tokens)


def test_aiperfs_records_give_the_figures_that_are_in_them(stats: Stats) -> None:
    first = json.loads(AIPERF.read_text("utf-8").splitlines()[0])["metrics"]
    told = {name: metric["value"] for name, metric in first.items()}
    found = stats(AIPERF)
    assert found["ttft_p50"] == pytest.approx(told["time_to_first_token"])
    assert found["e2e_p50"] == pytest.approx(told["request_latency"])
    assert found["tpot_p50"] == pytest.approx(told["inter_token_latency"])
    assert found["itl_p50"] == pytest.approx(sorted(told["inter_chunk_latency"])[3])
    assert found["itl_max"] == pytest.approx(max(told["inter_chunk_latency"]))
    assert (found["arrived"], found["finished"]) == (2, 1)  # the other one was cancelled


def test_a_request_without_streaming_has_no_token_times(tmp_path: Path, stats: Stats) -> None:
    first = json.loads(AIPERF.read_text("utf-8").splitlines()[0])
    for name in ("time_to_first_token", "inter_chunk_latency", "inter_token_latency"):
        del first["metrics"][name]
    found = stats(written(tmp_path / "profile_export.jsonl", first))
    assert found["e2e_p50"] == pytest.approx(297.525228)
    assert (found["ttft_p50"], found["itl_p50"], found["tpot_p50"]) == (None, None, None)
    assert found["out_tokens_per_s"] * found["seconds"] == pytest.approx(9)
    assert found["in_tokens_per_s"] * found["seconds"] == pytest.approx(550)


def test_chunks_of_several_tokens_are_one_gap_each(tmp_path: Path, stats: Stats) -> None:
    values = result() | {
        "input_lens": [10], "output_lens": [7], "ttfts": [0.5], "itls": [[0.1, 0.2]],
        "start_times": [3.0], "errors": [""],
    }  # fmt: skip
    found = stats(written(tmp_path / "result.json", values))
    assert (found["itl_p50"], found["itl_max"]) == (100.0, 200.0)
    assert found["tpot_p50"] == 50.0
    assert found["out_tokens_per_s"] * found["seconds"] == pytest.approx(7)


def test_failed_requests_have_no_latency_and_are_told(tmp_path: Path, stats: Stats) -> None:
    values = result()
    values["errors"] = ["Traceback:\nConnectionError: refused"] * 100 + [""]
    values["ttfts"] = [0.0] * 100 + values["ttfts"][-1:]
    found = stats(written(tmp_path / "result.json", values))
    assert (found["arrived"], found["finished"]) == (101, 1)
    assert found["ttft_max"] == pytest.approx(values["ttfts"][-1] * 1e3)
    values["errors"], values["ttfts"] = values["errors"][:100] * 2, [0.0] * 101
    with pytest.raises(RecordingError, match="a request that did not fail, of 101, got Connection"):
        imported(written(tmp_path / "failed.json", values))


def test_the_last_of_several_results_is_shown(tmp_path: Path, stats: Stats) -> None:
    path = written(tmp_path / "results.json", result() | {"itls": None}, result() | {"new": {}})
    assert stats(path)["finished"] == 101
    assert imported(path)[1] == "results.json: it holds 2 results: the last one is shown"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"itls": []}, "line 1, itls: expected 101 entries (--save-detailed), got none"),
        ({"input_lens": []}, "input_lens: expected an entry a request (--save-detailed)"),
        ({"ttfts": [0.1]}, "line 1, ttfts: expected 101 entries (--save-detailed), got 1"),
        ({"ttfts": [float("nan")] * 101}, "line 1, ttfts[0]: expected a number >= 0.0"),
        (
            {"input_lens": ["many"] * 101},
            "line 1, input_lens[0]: expected an integer, got",
        ),
        ({"itls": [3] * 101}, "line 1, itls[0]: expected a list, got an integer"),
    ],
)
def test_a_bad_field_is_named_with_what_was_expected(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    path = written(tmp_path / "result.json", result() | changed)
    with pytest.raises(RecordingError, match=rf"\A[^\n]*{re.escape(said)}[^\n]*\Z"):
        imported(path)


def test_json_of_another_kind_is_no_result(tmp_path: Path) -> None:
    assert imported(written(tmp_path / "other.json", {"a": 1}, {"b": [2]})) is None


@pytest.mark.slow
def test_every_command_that_looks_back_reads_a_foreign_file(tmp_path: Path, stepscope: Any) -> None:
    path, log, other = str(VLLM), str(SAMPLES / "vllm.log"), str(SGLANG)
    assert stepscope("check", path, "--min", "finished=101").exit_code == 0
    assert "TTFT" in stepscope("compare", path, other).stdout
    compared = json.loads(stepscope("compare", path, other, "--json").stdout)["figures"]
    assert compared["itl_p50"]["a"] is not None
    assert compared["itl_prefill_p50"]["a"] is None  # only its engine knows what ran beside it
    for file, name in ((path, "result"), (log, "log")):
        picture, figure = tmp_path / f"{name}.txt", tmp_path / f"{name}.svg"
        stepscope("screenshot", file, "-o", str(picture), "--axis", "time")
        assert "tokens in each record" in picture.read_text("utf-8")
        assert "as long as usual" not in picture.read_text("utf-8")  # moments have no usual length
        stepscope("plot", file, "-o", str(figure))
        assert figure.stat().st_size > 1000
        stepscope("export", file, "-o", str(tmp_path / f"{name}.csv"))


def test_nothing_is_left_behind_when_the_command_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stepscope.tui.cli", "stats", str(VLLM)]
    subprocess.check_output(command, env=os.environ | {"TMPDIR": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []
