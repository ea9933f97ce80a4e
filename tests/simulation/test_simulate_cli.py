"""`stepscope simulate`: the answers for other GPUs, knobs and numbers of engines."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stepscope.recordings import samples
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.simulation.basis import step_records

Run = Callable[..., str]
MIX = ("mix", "--rate", "8", "--num-requests", "40")
H100 = ("--gpu", "h100", "--model", "llama-3.1-8b")


def test_equal_seeds_print_equal_figures_marked_as_simulated(run: Run) -> None:
    first = run("simulate", *MIX, *H100)
    assert first.startswith("llama-3.1-8b on H100 SXM, by roofline: ")
    assert run("simulate", *MIX, *H100) == first
    assert run("simulate", *MIX, *H100, "--seed", "1") != first


def test_simulated_figures_of_seeds_have_a_lowest_median_and_highest(run: Run) -> None:
    found = json.loads(
        run("simulate", *MIX, *H100, "--runs", "3", "--json", "--slo-ttft", "20", "--slo-itl", "10")
    )
    assert found["seeds"] == [0, 1, 2]
    p99s = sorted(each["ttft_ms"]["p99"] for each in found["runs"])
    interval = found["figures"]["ttft_p99_ms"]
    assert [interval["low"], interval["median"], interval["high"]] == p99s
    for each in found["runs"]:
        assert each["itl_ms"]["p99"] <= each["itl_ms"]["max"]
    assert found["figures"]["itl_max_ms"]["high"] == max(x["itl_ms"]["max"] for x in found["runs"])
    assert all(0 < each["goodput_per_s"] < each["requests_per_s"] for each in found["runs"])


def test_explain_compare_and_screenshot_mark_a_recorded_simulation_as_simulated(
    run: Run, tmp_path: Path
) -> None:
    first, second = str(tmp_path / "first.mcap"), str(tmp_path / "second.mcap")
    printed = run("simulate", *MIX, *H100, "-o", first)
    run("simulate", *MIX, *H100, "--max-num-batched-tokens", "256", "-o", second)
    with Recording(first) as recording:
        steps = list(step_records(recording))
        assert recording.info.simulated == "llama-3.1-8b on H100 SXM, by roofline"
    assert f"{len(steps):,} steps" in printed
    assert steps[0].token_budget == 2048
    assert "all is well" in run("verify", first)
    assert "simulated" in run("explain", first).splitlines()[0]
    compared = run("compare", first, second, "--table")
    assert compared.splitlines()[0].startswith("A  first: simulated, ")
    assert "max_num_batched_tokens 2048 | 256" in compared
    screen = tmp_path / "screen.txt"
    run("screenshot", first, "--size", "80x24", "-o", str(screen))
    assert "simulated" in screen.read_text().splitlines()[0]


def test_simulated_steps_overlap_if_the_engine_named_by_option_like_overlaps_them(run: Run) -> None:
    def first_token_ms(*options: str) -> float:
        found = json.loads(run("simulate", *MIX, *H100, *options, "--json"))
        assert found["simulated"].endswith("steps overlap") == found["overlap"]
        return float(found["runs"][0]["ttft_ms"]["p50"])

    in_turn, ahead = first_token_ms(), first_token_ms("--overlap", "on")
    assert ahead > 1.3 * in_turn  # an arrival also waits for the step scheduled ahead
    like = first_token_ms("--like", "vllm")
    assert like > 1.3 * first_token_ms("--like", "vllm", "--overlap", "off")


def test_a_recording_is_simulated_with_its_recorded_knobs_and_step_times(run: Run) -> None:
    found = json.loads(run("simulate", "chunked", "--step-time", "chunked", "--json"))
    with Recording(samples.shipped()["chunked"]) as recording:
        assert found["num_blocks"] == recording.info.num_blocks
        budget = next(step_records(recording)).token_budget
    assert found["knobs"]["max_num_batched_tokens"] == budget
    assert found["simulated"] == "fit on chunked.mcap"


def test_a_gpu_alone_runs_a_default_mix_and_says_what_it_ran(run: Run) -> None:
    printed = run("simulate", "--gpu", "h100")
    assert printed.startswith("llama-3.1-8b on H100 SXM, by roofline: 8 requests/s: chats of 128")
    assert "requests   300 in " in printed
    assert "chosen     a mix of 300 requests (--num-requests, --rate); a trace or" in printed
    assert printed == run("simulate", "mix", "--gpu", "h100", "--model", "llama-3.1-8b")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((*MIX,), "give either --gpu (such as h100) or --step-time"),
        ((*MIX, "--gpu", "h900"), "there are: h100, h200"),
        ((*MIX, "--gpu", "h100", "--model", "gpt-9"), "there are: qwen3-0.6b"),
        (("nothing.csv", "--gpu", "h100"), "there is no recording nothing.csv"),
        ((*MIX, "--gpu", "h100", "--slo-itl", "fast"), "a duration such as 50ms"),
        ((*MIX, "--gpu", "h100", "--like", "tgi"), "no engine is called 'tgi'; there are: vllm"),
        ((*MIX, "--gpu", "rtx4090", "--model", "llama-3.1-70b"), "take more GPUs"),
        (
            (*MIX, "--gpu", "h100", "--no-enable-chunked-prefill"),
            "or set enable_chunked_prefill=true",
        ),
    ],
)
def test_what_cannot_be_simulated_gives_a_one_line_error_with_a_remedy(
    run: Run, arguments: tuple[str, ...], expected: str
) -> None:
    line = run("simulate", *arguments)
    assert line.startswith("stepscope: error: ")
    assert expected in line


@pytest.mark.slow
def test_ctrl_c_during_a_simulation_leaves_a_complete_recording(tmp_path: Path) -> None:
    path = tmp_path / "long.mcap"
    command = [sys.executable, "-m", "stepscope.tui.cli", "simulate", "mix", "--rate", "20"]
    command += ["--num-requests", "4000", *H100, "-o", str(path)]
    environment = {**os.environ, "STEPSCOPE_CONFIG": "none"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            deadline_s = time.monotonic() + 60
            part = path.with_name(path.name + ".part")
            while not part.exists() or part.stat().st_size < 10_000:
                assert process.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert said.splitlines()[-1].startswith("stepscope: error: interrupted")
    with Recording(path) as recording:
        assert not recording.truncated
        assert len(list(step_records(recording))) > 10
