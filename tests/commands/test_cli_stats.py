"""`stepscope stats` and `check`: the same figures in every command, and exit codes for CI."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.engine.protocol.knobs import Knobs
from stepscope.recordings.compare.figures import ComparedFigure
from stepscope.recordings.figures import FIGURES, Better
from stepscope.tui.cli.recordings.check import regression
from tests.support.engines.cost_model import CostModel
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.sessions.seek_sessions import record

_MIX = ["--num-requests", "20", "--rate", "1000", "--document-share", "0"]


def session(path: Path, seed: int = 3, floor_ms: float = 12.0, num_steps: int = 500) -> Path:
    knobs = Knobs(max_num_batched_tokens=1024, max_num_seqs=16)
    workload = SimulatedWorkload(rate=6.0, document_tokens=2000)
    cost = CostModel(floor_ms=floor_ms, token_us=floor_ms * 5, context_ns=floor_ms / 3)
    return record(path, simulate(seed, num_steps, knobs=knobs, workload=workload, cost=cost))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return session(tmp_path_factory.mktemp("stats") / "session.mcap")


def test_stats_gives_every_figure_and_the_service_levels(
    file: Path, stepscope: Callable[..., Any]
) -> None:
    found = json.loads(stepscope("stats", str(file), "--slo-itl", "40ms", "--json").stdout)
    assert set(found["figures"]) == set(FIGURES)
    assert found["slo"] == {"ttft_ms": 500.0, "itl_ms": 40.0}
    assert found["figures"]["steps"] == 500
    text = stepscope("stats", str(file)).stdout
    assert "500 steps" in text
    assert "p50" in text
    assert all(name in text for name in ("goodput", "prefix_hit_rate", "preemptions"))


def test_stats_can_be_limited_to_the_last_seconds_of_a_recording(
    file: Path, stepscope: Callable[..., Any]
) -> None:
    done = stepscope("stats", str(file), "--seconds", "2", "--json")
    figures = json.loads(done.stdout)["figures"]
    assert 1.8 < figures["seconds"] < 2.3
    assert 0 < figures["steps"] < 500


def test_load_stats_and_snapshot_give_the_figures_of_an_engine_the_same_names(
    live_engine: Any, stepscope: Callable[..., Any]
) -> None:
    endpoint = live_engine.endpoint.control
    done = stepscope("load", endpoint, *_MIX, "--output-tokens", "8", "--json")
    loaded = json.loads(done.stdout)
    assert loaded["sent"] == 20
    figures = loaded["figures"]
    assert set(figures) <= set(FIGURES)
    assert figures["finished"] == 20
    assert figures["ttft_p50"] <= figures["ttft_p90"] <= figures["ttft_max"]
    of_engine = json.loads(stepscope("stats", endpoint, "--json").stdout)["figures"]
    in_snapshot = json.loads(stepscope("snapshot", endpoint, "--json").stdout)["figures"]
    assert set(of_engine) == set(in_snapshot) == set(FIGURES)
    assert of_engine["finished"] == in_snapshot["finished"] == 20
    assert of_engine["itl_p99"] == in_snapshot["itl_p99"] > 0
    path = endpoint.removeprefix("ipc://")  # as a shell completes it
    assert json.loads(stepscope("stats", path, "--json").stdout)["figures"]["finished"] == 20
    assert stepscope("snapshot", "--audit", path).exit_code == 0


def test_load_reports_the_share_of_prefix_cache_hits(
    live_engine: Any, stepscope: Callable[..., Any]
) -> None:
    same = [live_engine.endpoint.control, *_MIX, "--output-tokens", "8", "--seed", "1", "--json"]
    first, again = (json.loads(stepscope("load", *same).stdout)["figures"] for _ in range(2))
    assert again["prefix_hit_rate"] > first["prefix_hit_rate"]


@pytest.mark.parametrize(
    ("bounds", "exit_code"),
    [
        (["--max", "itl_p99=10s", "--min", "finished=1"], 0),
        (["--max", "itl_p99=1ms"], 1),
        (["--min", "goodput=100%", "--max", "itl_p99=10s"], 1),
    ],
)
def test_check_ends_with_1_if_a_bound_does_not_hold(
    file: Path, stepscope: Callable[..., Any], bounds: list[str], exit_code: int
) -> None:
    done = stepscope("check", str(file), *bounds)
    assert done.exit_code == exit_code, done.stderr
    assert ("failed" in done.stdout) == (exit_code == 1)
    found = json.loads(stepscope("check", str(file), *bounds, "--json").stdout)
    assert found["exit_code"] == exit_code
    assert ("failed" in [each["outcome"] for each in found["checks"]]) == (exit_code == 1)


def test_check_ends_with_3_if_there_is_too_little_data(
    tmp_path: Path, live_engine: Any, stepscope: Callable[..., Any]
) -> None:
    short = session(tmp_path / "short.mcap", num_steps=5)
    done = stepscope("check", str(short), "--max", "tpot_p99=1s")
    assert (done.exit_code, "no sample" in done.stdout) == (3, True)
    idle = stepscope("check", live_engine.endpoint.control, "--max", "itl_p99=1s")
    assert idle.exit_code == 3
    assert "no step to measure" in idle.stderr


def test_check_finds_a_regression_against_a_baseline_recording(
    tmp_path: Path, file: Path, stepscope: Callable[..., Any]
) -> None:
    same = stepscope("check", str(file), "--baseline", str(file))
    assert same.exit_code == 0, same.stdout
    slower = session(tmp_path / "slower.mcap", floor_ms=16.0)
    done = stepscope("check", str(slower), "--baseline", str(file), "--max-regression", "10%")
    assert done.exit_code == 1, done.stdout
    assert "which is significant" in done.stdout
    accepted = stepscope("check", str(slower), "--baseline", str(file), "--max-regression", "900%")
    assert accepted.exit_code == 0, accepted.stdout


def test_check_calls_unsure_what_may_be_chance(stepscope: Callable[..., Any]) -> None:
    done = stepscope("check", "chunked", "--baseline", "freeze", "--json")
    outcomes = {each["name"]: each["outcome"] for each in json.loads(done.stdout)["checks"]}
    assert (outcomes["ttft_p95"], outcomes["itl_p95"]) == ("unsure", "failed")


@pytest.mark.parametrize(
    ("better", "a", "b", "expected"),
    [("higher", 0.0, 3.0, -math.inf), ("lower", 0.0, 3.0, math.inf), ("lower", 2.0, 3.0, 0.5)],
)
def test_a_figure_that_was_zero_in_the_baseline_is_worse_only_if_it_moves_the_bad_way(
    better: Better, a: float, b: float, expected: float
) -> None:
    assert regression(ComparedFigure("rate", "rate", "/s", a, b, better, "unclear")) == expected


def test_a_baseline_changes_no_figure_of_what_is_checked(stepscope: Callable[..., Any]) -> None:
    checked = ["check", "freeze", "--seconds", "3", "--slo-itl", "20ms", "--min", "goodput=0"]
    alone, beside = (
        json.loads(stepscope(*checked, "--json", *more).stdout)["figures"]
        for more in ((), ("--baseline", "freeze"))
    )
    assert alone == beside
