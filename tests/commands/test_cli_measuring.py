"""`stepscope bench` has figures that agree, and a clean end; `stepscope lab` judges claims."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.recordings.samples import shipped
from stepscope.tui.cli.lab.arms import ArmRun
from stepscope.tui.cli.lab.experiments import EXPERIMENTS, judge_knee
from stepscope.tui.cli.lab.lab import draw, lines, markdown

COMMAND = (sys.executable, "-m", "stepscope.tui.cli", "bench")


def environment(tmp_path: Path, runtime_folder: Path) -> dict[str, str]:
    folders = {"XDG_RUNTIME_DIR": str(runtime_folder), "XDG_CONFIG_HOME": f"{tmp_path}/config"}
    return {**os.environ, **folders}


def test_bench_prints_a_table_and_writes_every_figure_to_the_json_file(
    tmp_path: Path, runtime_folder: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    file = tmp_path / "out.json"
    options = (
        "--num-requests 6 --threads 1 --input-len 8:40 --output-len 12 --max-num-batched-tokens 64 "
        f"--dtype float32 --kv-memory 16MB --json {file} --model {tiny_checkpoint('qwen3')}"
    )
    command, env = [*COMMAND, *options.split()], environment(tmp_path, runtime_folder)
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(file.read_text())
    result = document["result"]
    assert (result["num_finished"], result["num_output_tokens"]) == (6, 72)
    assert result["is_partial"] is False
    assert result["output_tokens_per_s"] == pytest.approx(72 / result["seconds"])
    assert result["itl_ms"]["num_samples"] == 6 * 11
    assert sum(result["steps"]["shares"].values()) == pytest.approx(1.0)
    assert 0 < result["steps"]["budget_use"] <= 1
    assert document["knobs"]["max_num_batched_tokens"] == 64
    assert document["config"]["dtype"] == document["engine"]["dtype"] == "float32"
    assert document["engine"]["attention_backend"]
    assert document["machine"]["cpu"]
    assert document["machine"]["packages"]["torch"]
    assert (document["num_threads"], document["work"]["input_len"]) == (1, [8, 40])

    lines = done.stdout.splitlines()
    assert re.fullmatch(r"output +[\d,.]+ tokens/s +\(72 in \d+\.\d s\)", lines[0])
    assert "(6 of 6 finished)" in done.stdout
    assert max(map(len, lines)) <= 100
    assert "scaled down" not in done.stderr, "so many requests were asked for"
    assert not list(runtime_folder.rglob("*.telemetry")), "a socket was left behind"


def test_on_a_cpu_the_bench_is_scaled_down_says_so_and_ends_on_ctrl_c(
    tmp_path: Path, runtime_folder: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    model = tiny_checkpoint("qwen3", max_position_embeddings=4096)
    file = tmp_path / "out.json"
    command = [*COMMAND, "--model", str(model), "--device", "cpu", "--json", str(file)]
    env, pipe = environment(tmp_path, runtime_folder), subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env)
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if line.startswith("measuring"):
                process.send_signal(signal.SIGINT)
                break
        out, rest = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    errors = "".join(said) + rest
    assert "scaled down for a CPU: the first 32 of 256 requests" in errors
    assert "the full yardstick: --num-requests 256" in errors
    assert process.returncode == 130
    assert rest.splitlines()[-1].startswith("stepscope: error: interrupted with ")
    assert "Traceback" not in errors
    assert "(partial: interrupted)" in out.splitlines()[0]
    result = json.loads(file.read_text())["result"]
    assert result["is_partial"] is True
    assert result["num_finished"] < result["num_requests"] == 32


def test_lab_lists_every_experiment_with_its_source(stepscope: Callable[..., Any]) -> None:
    done = stepscope("lab")
    assert done.exit_code == 0, done.stderr
    for each in EXPERIMENTS:
        assert each.name in done.stdout
        assert each.claim in done.stdout
        assert each.source in done.stdout
    names = [each.name for each in EXPERIMENTS]
    assert len(set(names)) == len(names)


def test_the_shipped_samples_reproduce_the_freeze_experiment_of_the_lab(tmp_path: Path) -> None:
    paths = shipped()
    runs = [ArmRun(name, paths[name], {}) for name in ("freeze", "chunked")]
    experiment = next(each for each in EXPERIMENTS if each.name == "freeze")
    finding = experiment.finding(runs)
    assert finding.verdict == "reproduced"
    assert finding.measured.startswith("longest ITL 837 ms whole")
    printed = "\n".join(lines(experiment, finding, runs))
    assert "verdict   reproduced" in printed
    assert "freeze.mcap (freeze: 454 steps)" in printed
    assert "| reproduced |" in markdown([(experiment, finding)], "this machine")
    draw(experiment, finding, tmp_path / "freeze.svg")
    assert "<svg" in (tmp_path / "freeze.svg").read_text()


def test_the_knee_of_the_lab_is_that_of_the_steps_of_all_arms() -> None:
    paths = shipped()
    values = {"TTFT of documents, ms": [900.0, 800.0], "ITL p99, ms": [90.0, 770.0]}
    runs = [ArmRun("16", paths["chunked"], {}), ArmRun("256", paths["freeze"], {})]
    finding = judge_knee(runs, values)
    assert finding.holds
    told = re.search(r"; steps are bound by compute from about (\d+) tokens on$", finding.measured)
    assert 16 < int(told[1]) < 35
    assert finding.marked == ("256", "bound by compute from here")
    unknown = judge_knee([ArmRun("16", paths["vllm"], {})] * 2, values)
    assert unknown.measured.endswith("to 770 ms")
    assert unknown.marked is None
