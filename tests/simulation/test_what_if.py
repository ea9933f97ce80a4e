"""What a forecast from a recording is based on, and the error when it cannot be made."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepscope.engine.simulation import virtual_session as session
from stepscope.recordings import samples
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.simulation.basis import WhatIfBasis, basis_of
from stepscope.recordings.simulation.recorded import recorded_work
from stepscope.recordings.simulation.what_if import Forecast, Predicted, WhatIf, run_once, what_if
from stepscope.recordings.state.latency import SLO
from stepscope.tui.cli.shared.arguments import variants_of
from stepscope.tui.cli.simulation import what_if as command
from stepscope.tui.cli.simulation.what_if import report

Run = Callable[..., str]
WORK = ("mix", "--rate", "8", "--num-requests", "150", "--document-share", "0.2", "--gpu", "h100")


@pytest.fixture(autouse=True)
def _few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "forecasts", partial(what_if, num_runs=4))


def test_a_forecast_for_another_budget_agrees_with_a_run_under_it(run: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "session.mcap")
    recorded = json.loads(run("simulate", *WORK, "-o", path, "--json"))["runs"][0]
    other = ("--max-num-batched-tokens", "512")
    truth = json.loads(run("simulate", *WORK, *other, "--json"))["runs"][0]
    found = json.loads(run("what-if", path, "max_num_batched_tokens=512", "--json"))
    assert found["num_requests"] == 150
    # The recording's own figures are those of the recorded run.
    for name in ("ttft", "itl", "e2e"):
        for rank in ("p50", "p95", "p99"):
            key = f"{name}_{rank}_ms"
            assert found["recorded"][key] == pytest.approx(recorded[f"{name}_ms"][rank], rel=1e-6)
    forecast = found["variants"][0]["figures"]
    for name in ("itl", "e2e"):
        for rank in ("p50", "p95"):
            real = truth[f"{name}_ms"][rank]
            assert forecast[f"{name}_{rank}_ms"]["value"] == pytest.approx(real, rel=0.15)


def test_an_engine_with_overlap_is_forecast_with_overlap(run: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "session.mcap")
    run("simulate", *WORK, "--overlap", "on", "-o", path)
    found = json.loads(run("what-if", path, "max_num_batched_tokens=512", "--json"))
    again = found["simulated"]["figures"]
    # A step sooner, the first token of most would come after less than two thirds of the time.
    for name in ("ttft_p50_ms", "itl_p50_ms", "e2e_p50_ms"):
        assert again[name]["value"] == pytest.approx(found["recorded"][name], rel=0.1)


def test_without_published_hashes_simulated_requests_share_the_prefixes_that_were_hit(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "session.mcap"
    monkeypatch.setattr(session, "PrefixHashes", lambda kv, salt: None)  # none are published
    run("simulate", *WORK, "-o", str(path))
    with Recording(path) as recording:
        work = recorded_work(recording, SLO())
    assert work.num_hits > 50
    assert work.num_unknown_hits < work.num_hits / 10
    found = json.loads(run("simulate", str(path), "--step-time", str(path), "--json"))["runs"][0]
    assert found["hit_share"] == pytest.approx(work.figures.hit_share, rel=0.1)


def test_prefix_hits_are_forecast_from_a_session_without_a_cache(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "session.mcap"
    truth = json.loads(run("simulate", *WORK, "--json"))["runs"][0]
    run("simulate", *WORK, "--no-enable-prefix-caching", "-o", str(path))
    with Recording(path) as recording:
        basis = basis_of(recording, SLO())
    figures, _ = run_once(basis, {"enable_prefix_caching": True}, SLO(), seed=0)
    assert truth["hit_share"] > 0.02
    assert figures.result().hit_share == pytest.approx(truth["hit_share"], rel=0.02)


def test_knobs_apart_by_spaces_change_together_and_commas_try_each_value(run: Run) -> None:
    assert variants_of(["batching=static", "max-num-seqs=8,16"]) == [
        ("batching=static max_num_seqs=8", {"batching": "static", "max_num_seqs": 8}),
        ("batching=static max_num_seqs=16", {"batching": "static", "max_num_seqs": 16}),
    ]
    assert variants_of(["batching=static", "max_num_seqs=8..16"]) == variants_of(
        ["batching=static", "max-num-seqs=8,16"]
    )
    found = json.loads(run("what-if", "chunked", "batching=static", "max_num_seqs=8", "--json"))
    assert [each["text"] for each in found["variants"]] == ["batching=static max_num_seqs=8"]


def test_a_what_if_table_has_a_row_for_each_value(run: Run) -> None:
    lines = run("what-if", "chunked", "max_num_batched_tokens=64..512").splitlines()
    assert [line for line in lines if line.startswith("recorded ")]
    assert [line for line in lines if line.startswith("simulated ")]
    for budget in (64, 128, 256, 512):
        assert [line for line in lines if line.startswith(f"max_num_batched_tokens={budget} ")]
    printed = run("what-if", "vllm", "max_num_batched_tokens=256")
    assert "unlike any in the recording" in printed
    assert "simulated as if they shared one prefix" in printed


def test_a_what_if_variant_can_be_recorded_for_comparison(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "chunked.mcap"
    change = ("enable_chunked_prefill=true", "max_num_batched_tokens=256")
    assert f"wrote {path}" in run("what-if", "freeze", *change, "-o", str(path))
    with Recording(path) as recording:
        assert " ".join(change) in str(recording.info.simulated)
    assert "B better" in run("compare", "freeze", str(path))
    assert "of one variant" in run("what-if", "freeze", "max_num_seqs=8,9", "-o", str(path))


@pytest.fixture
def basis() -> WhatIfBasis:
    with Recording(samples.shipped()["chunked"]) as recording:
        return basis_of(recording, SLO())


def test_a_what_if_report_says_if_the_machine_was_disturbed(basis: WhatIfBasis) -> None:
    calm = WhatIf({}, Forecast("as recorded", {}, 0.0, []), [], drift=0.03)
    for found, is_noted in ((calm, False), (calm._replace(drift=0.4), True)):
        said = "\n".join(report(found, basis, SLO()))
        assert ("note: the machine's speed changed by 40%" in said) == is_noted


def test_a_too_wide_forecast_leaves_out_the_intervals(
    basis: WhatIfBasis, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{kind}_p{rank}_ms" for kind in ("ttft", "itl", "e2e") for rank in (50, 95, 99)]
    figures = dict.fromkeys([*names, "goodput_per_s"], Predicted(12345.0, 10000.0, 20000.0))
    cases = [Forecast(f"max_num_seqs={number}", figures, 0.0, []) for number in range(5)]
    found = WhatIf(dict.fromkeys(figures, 1.0), *(cases[0], cases[1:]), drift=0.0)
    monkeypatch.setenv("COLUMNS", "120")
    assert "(10,000 to 20,000)" in "\n".join(report(found, basis, SLO()))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    lines = list(report(found, basis, SLO()))
    assert "(10,000 to 20,000)" not in "\n".join(lines)
    assert max(len(line) for line in lines if line.startswith("max_num_seqs")) <= 120


def test_a_recording_too_short_for_a_forecast_is_refused(run: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "short.mcap")
    run("simulate", "mix", "--num-requests", "12", "--rate", "8", "--gpu", "h100", "-o", path)
    assert "record longer, under load" in run("what-if", path, "max_num_seqs=8")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("vllm",), "give knobs, such as max_num_batched_tokens=256,1024 or"),
        (("vllm", "batching=static,order=arrival"), "a space stands between"),
        (("vllm", "max_num_seqs=8", "max_num_seqs=16"), "max_num_seqs is given twice"),
        (("vllm", "max_num_seqs=1,2,3,4,5,6", "block_size=1,2"), "'block_size' is no knob"),
        (("vllm", "budget=3"), "the knobs are max_num_batched_tokens, "),
        (("vllm", "max_num_seqs=none"), "expected a whole number"),
        (("vllm", "max_num_seqs=8.."), "expected FIRST..LAST, two whole numbers"),
        (("vllm", "max_num_seqs=8", "-o", "a.svg"), "ends in .mcap, got a.svg"),
        (
            ("freeze", "max_num_batched_tokens=64"),
            "max_num_batched_tokens=64, with the other knobs as recorded: whole prompts need max",
        ),
        (("nothing.mcap", "max_num_seqs=8"), "there is no recording nothing.mcap"),
    ],
)
def test_what_cannot_be_forecast_gives_a_one_line_error_with_a_remedy(
    run: Run, arguments: tuple[str, ...], expected: str
) -> None:
    line = run("what-if", *arguments)
    assert line.startswith("stepscope: error: ")
    assert expected in line


def test_a_recording_without_the_size_of_its_cache_cannot_be_simulated(tmp_path: Path) -> None:
    with Recording(samples.shipped()["vllm"]) as recording:
        work = recorded_work(recording, SLO())
        assert work.num_blocks == recording.info.num_blocks
    assert work.num_begun == 2
    assert work.num_unfinished == 15
