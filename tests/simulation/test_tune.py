"""Which knobs `tune` finds, and what it says if none keeps the service levels."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stepscope.recordings.simulation import diagnosis, tuning

Run = Callable[..., str]
WORK = ("mix", "--num-requests", "30", "--document-share", "0.2", "--gpu", "h100",
        "--max-model-len", "4096")  # fmt: skip


@pytest.fixture(autouse=True)
def _few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tuning, diagnosis):
        monkeypatch.setattr(module, "NUM_RUNS", 3)


def test_tune_raises_a_prefill_threshold_that_makes_ttfts_late_and_keeps_other_knobs(
    run: Run, tmp_path: Path
) -> None:
    path = str(tmp_path / "session.mcap")
    run("simulate", *WORK, "--rate", "3", "--long-prefill-token-threshold", "16", "-o", path)
    found = json.loads(run("tune", path, "--slo-itl", "30ms", "--slo-ttft", "500ms", "--json"))
    best = found["best"]
    assert set(best["changes"]) == {"long_prefill_token_threshold"}
    assert "stepscope set long_prefill_token_threshold=" in found["verdict"]
    recorded = next(each for each in found["candidates"] if not each["changes"])
    assert not recorded["keeps"]


def test_tune_marks_a_max_num_seqs_above_any_recorded_batch_as_a_guess(
    run: Run, tmp_path: Path
) -> None:
    path = str(tmp_path / "session.mcap")
    run("simulate", *WORK, "--rate", "3", "--max-num-seqs", "1", "-o", path)
    found = json.loads(run("tune", path, "--slo-itl", "100ms", "--slo-ttft", "500ms", "--json"))
    assert found["best"] is None
    assert "max_num_seqs" in found["promising"]["changes"]
    assert found["promising"]["keeps"]
    assert 0 < found["load_that_keeps_per_s"] < found["load_per_s"]
    assert "of the load) would do; max_num_seqs limited" in found["verdict"]


def test_tune_says_that_service_levels_below_a_step_time_cannot_be_kept(
    run: Run, tmp_path: Path
) -> None:
    path = str(tmp_path / "session.mcap")
    run("simulate", *WORK, "--rate", "4", "-o", path)
    found = json.loads(run("tune", path, "--slo-itl", "1ms", "--json"))
    assert found["best"] is None
    assert found["load_that_keeps_per_s"] is None
    assert "cannot be kept, because p95 ITL" in found["verdict"]
    assert "only the speed of the machine" in found["verdict"]


def test_tune_finds_chunks_for_prompts_that_were_prefilled_whole(run: Run) -> None:
    found = json.loads(run("tune", "freeze", "--json"))
    assert found["diagnosis"]["bottlenecks"][0]["suspect"] == "batching"
    recorded = next(each for each in found["candidates"] if not each["changes"])
    assert recorded["kept_share"] < 0.5  # 7 of 19 kept every token in time
    assert found["best"]["changes"]["enable_chunked_prefill"] is True
    assert found["best"]["keeps"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("freeze", "--hold", "itl=50ms"), "--hold: only of an engine that runs"),
        (("freeze.mcap", "--hold", "itl=50ms"), "--hold: only of an engine that runs"),
        (("engine-0", "--hold", "ttft=1s"), "--hold: expected itl=TIME such as itl=50ms"),
        (("freeze", "--shadow"), "--shadow and --as: only with --hold"),
    ],
)
def test_the_options_of_the_autopilot_are_for_engines(
    run: Run, arguments: tuple[str, ...], said: str
) -> None:
    assert said in run("tune", *arguments)


def test_tune_names_one_budget_for_chunks_and_says_what_is_simulated(run: Run) -> None:
    lines = run("tune", "freeze").splitlines()
    (verdict,) = (line for line in lines if line.startswith("bottleneck: batching"))
    (best,) = (line for line in lines if line.startswith("best: "))
    assert lines.index(verdict) < lines.index(best)
    change = "stepscope set enable_chunked_prefill=true max_num_batched_tokens=256"
    assert change in verdict
    assert best == f"best: {change}"
    assert [line for line in lines if line.endswith("as recorded, simulated")]
