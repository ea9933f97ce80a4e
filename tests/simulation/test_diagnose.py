"""`tune --bottleneck` names bottlenecks that were made on purpose."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.recordings.compare.recording_feed import RecordingFeed
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.step_range import StepRange
from stepscope.recordings.simulation import diagnosis, tuning
from stepscope.recordings.simulation.basis import basis_of
from stepscope.recordings.simulation.diagnosis import SUSPECTS, seen_of
from stepscope.recordings.state.latency import SLO
from stepscope.tui.cli.recordings.measured import read_side
from stepscope.tui.cli.simulation import tune

Run = Callable[..., str]
WORK = ("mix", "--num-requests", "100", "--document-share", "0.15", "--document-tokens", "6000",
        "--gpu", "h100", "--max-model-len", "8192", "--rate", "12",
        "--block-size", "64")  # fmt: skip
LEVELS = ("--slo-itl", "100ms", "--slo-ttft", "1s")


@pytest.fixture(autouse=True)
def _few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tuning, diagnosis):
        monkeypatch.setattr(module, "NUM_RUNS", 3)


@pytest.fixture(scope="module")
def sessions() -> dict[tuple[str, ...], Path]:
    """The sessions recorded so far, by their options."""
    return {}


@pytest.fixture
def recorded(
    run: Run, tmp_path: Path, sessions: dict[tuple[str, ...], Path]
) -> Callable[..., Path]:
    """Records a session simulated with these options; the same options give the same file."""

    def of(*arguments: str) -> Path:
        if arguments not in sessions:
            path = tmp_path / "session.mcap"
            run("simulate", *arguments, "-o", str(path))
            sessions[arguments] = path
        return sessions[arguments]

    return of


@pytest.fixture
def diagnosed(run: Run, recorded: Callable[..., Path]) -> Callable[..., dict[str, Any]]:
    """What `tune --bottleneck` says of a simulated session."""

    def of(*arguments: str, levels: tuple[str, ...] = LEVELS) -> dict[str, Any]:
        path = str(recorded(*arguments))
        found: dict[str, Any] = json.loads(run("tune", "--bottleneck", path, *levels, "--json"))
        return found

    return of


@pytest.mark.parametrize(
    ("options", "suspect", "remedy"),
    [
        (("--max-num-seqs", "5"), "seats (max_num_seqs)", "max_num_seqs=10"),
        (("--max-num-batched-tokens", "96"), "small token budget", "max_num_batched_tokens=192"),
        (("--batching", "static"), "batching", "batching=chunked"),
        (("--num-blocks", "155"), "KV memory", "twice the KV blocks"),
    ],
)
def test_tune_names_a_knob_that_was_set_too_small(
    diagnosed: Callable[..., dict[str, Any]], options: tuple[str, ...], suspect: str, remedy: str
) -> None:
    found = diagnosed(*WORK, *options)
    assert found["kept_share"] < 0.95
    first = found["bottlenecks"][0]
    assert first["suspect"] == suspect
    assert first["trial"]["remedy"].startswith(remedy)
    assert first["trial"]["kept_share"] > found["kept_share"]


def test_tune_names_a_disabled_prefix_cache_if_prompts_share_prefixes(
    diagnosed: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    trace = tmp_path / "alike.jsonl"
    system = list(range(14))  # 7,168 tokens that all prompts begin with
    rows = [
        {"timestamp": at * 80, "input_length": 7500, "output_length": 40,
         "hash_ids": [*system, 1000 + at]}
        for at in range(40)
    ]  # fmt: skip
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--gpu", "h100", "--max-model-len", "8192", "--block-size", "64")
    found = diagnosed(str(trace), *options, "--no-enable-prefix-caching")
    assert found["bottlenecks"][0]["suspect"] == "prefix cache"
    assert found["bottlenecks"][0]["trial"]["kept_share"] > 0.9


def test_tune_names_no_bottleneck_if_the_service_levels_are_kept(
    diagnosed: Callable[..., dict[str, Any]],
) -> None:
    found = diagnosed(*WORK, levels=("--slo-itl", "500ms", "--slo-ttft", "60s"))
    assert found["bottlenecks"] == []
    assert "no bottleneck" in found["verdict"]
    assert [each["suspect"] for each in found["findings"] if each["trial"]] == []


def test_tune_blames_no_knob_for_a_slow_machine(diagnosed: Callable[..., dict[str, Any]]) -> None:
    found = diagnosed(*WORK, levels=("--slo-itl", "3ms", "--slo-ttft", "1s"))
    assert found["bottlenecks"] == []
    assert "the machine is too slow" in found["verdict"]


def test_tune_names_what_an_attached_engine_waited_for_instead_of_its_machine() -> None:
    nothing: Any = None
    held = {"lora": 0.73}
    found = diagnosis.Diagnosis(nothing, kept_share=0.2, findings=[], bottlenecks=[], held=held)
    assert list(tune._bottlenecks(found)) == [
        "no setting is the bottleneck: LoRA slots (max_loras) limited 73% of the recorded steps, "
        "which no simulation lifts"
    ]


def test_tune_names_host_work_if_it_is_most_of_a_step(recorded: Callable[..., Path]) -> None:
    path = recorded(*WORK)
    level = SLO(ttft_ms=1000.0, itl_ms=9.0)
    with Recording(path) as recording:
        basis = basis_of(recording, level)
    model = msgspec.structs.replace(basis.model, host_s=0.006)
    basis = basis._replace(model=model, setup=msgspec.structs.replace(basis.setup, model=model))
    side = read_side(RecordingFeed(Recording(path), "session", level, StepRange()))
    found = diagnosis.diagnose(seen_of(side, basis), level, lambda what, share: False)
    assert found.bottlenecks[0][0].name == "host time between steps"


def test_tune_suggests_no_change_that_the_engine_refuses(recorded: Callable[..., Path]) -> None:
    path = recorded(*WORK)
    with Recording(path) as recording:
        setup = basis_of(recording, SLO()).setup
    remedies = [remedy for suspect in SUSPECTS for remedy in suspect.remedies(setup)]
    assert remedies
    for remedy in remedies:
        knobs = remedy.setup.knobs.changed(remedy.changes, remedy.setup.limits)
        assert (knobs, remedy.setup) != (setup.knobs, setup)


def test_tune_says_if_a_session_is_too_short_for_a_forecast(
    run: Run, recorded: Callable[..., Path]
) -> None:
    path = recorded(*WORK[:2], "3", *WORK[3:])
    assert "record longer" in run("tune", "--bottleneck", str(path))


SMALL_WORK = ("mix", "--num-requests", "30", "--document-share", "0.2", "--gpu", "h100",
        "--max-model-len", "4096")  # fmt: skip


def test_tune_raises_a_prefill_threshold_that_makes_ttfts_late_and_keeps_other_knobs(
    run: Run, recorded: Callable[..., Path]
) -> None:
    path = str(recorded(*SMALL_WORK, "--rate", "3", "--long-prefill-token-threshold", "16"))
    found = json.loads(run("tune", path, "--slo-itl", "30ms", "--slo-ttft", "500ms", "--json"))
    best = found["best"]
    assert set(best["changes"]) == {"long_prefill_token_threshold"}
    assert "stepscope set long_prefill_token_threshold=" in found["verdict"]
    recorded = next(each for each in found["candidates"] if not each["changes"])
    assert not recorded["keeps"]


def test_tune_marks_seats_above_any_recorded_batch_as_a_guess(run: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "session.mcap")
    run("simulate", *SMALL_WORK, "--rate", "3", "--max-num-seqs", "1", "-o", path)
    found = json.loads(run("tune", path, "--slo-itl", "100ms", "--slo-ttft", "500ms", "--json"))
    assert found["best"] is None
    guesses = [each for each in found["candidates"] if each["share_extrapolated"] > 0.2]
    assert any("max_num_seqs" in each["changes"] and each["keeps"] for each in guesses)
    assert 0 < found["load_that_keeps_per_s"] < found["load_per_s"]
    assert "of the load) would do; max_num_seqs limited" in found["verdict"]


def test_tune_says_that_levels_below_a_step_time_cannot_be_kept(run: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "session.mcap")
    run("simulate", *SMALL_WORK, "--rate", "4", "-o", path)
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
        (("freeze", "--hold", "--slo-itl", "5ms"), "--hold: only of an engine that runs"),
        (("no.mcap", "--hold", "--slo-itl", "5ms"), "--hold: only of an engine that runs"),
        (("freeze", "--shadow"), "--shadow: only with --hold"),
    ],
)
def test_the_options_of_the_autopilot_are_for_engines(
    run: Run, arguments: tuple[str, ...], said: str
) -> None:
    assert said in run("tune", *arguments)


def test_tune_names_the_bottleneck_then_the_same_budget_for_chunks(run: Run) -> None:
    lines = run("tune", "freeze").splitlines()
    verdict, best = (line for line in lines if line.startswith(("bottleneck: batching", "best: ")))
    change = "stepscope set enable_chunked_prefill=true max_num_batched_tokens=256"
    assert change in verdict
    assert best == f"best: {change}"
    assert lines.index(verdict) < lines.index(best)
    assert [line for line in lines if line.endswith("as recorded, simulated")]
