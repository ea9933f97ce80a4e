"""`stepscope bench throughput`: its figures agree with each other, and it ends cleanly."""

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

from stepscope.tui.cli.__main__ import main

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "stepscope.tui.cli", "bench", "throughput")


def environment(tmp_path: Path, runtime_folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "XDG_RUNTIME_DIR": str(runtime_folder),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }


def usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["stepscope", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert said.out == ""
    return int(ended.value.code or 0), said.err


def test_bench_prints_a_table_and_writes_every_figure_to_the_json_file(
    tmp_path: Path, runtime_folder: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    file = tmp_path / "out.json"
    arguments = (
        *("--model", str(tiny_checkpoint("qwen3")), "--num-requests", "6", "--threads", "1"),
        *("--input-len", "8:40", "--output-len", "12", "--max-num-batched-tokens", "64"),
        *("--dtype", "float32", "--kv-memory", "16MB", "--json", str(file)),
    )
    done = subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=environment(tmp_path, runtime_folder),
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
    assert document["num_threads"] == 1
    assert document["machine"]["cpu"]
    assert document["machine"]["packages"]["torch"]
    assert document["work"]["input_len"] == [8, 40]

    lines = done.stdout.splitlines()
    assert re.fullmatch(r"output +[\d,.]+ tokens/s +\(72 in \d+\.\d s\)", lines[0])
    assert "(6 of 6 finished)" in done.stdout
    assert max(map(len, lines)) <= 100
    assert "6 requests" in done.stderr
    assert "72 output tokens" in done.stderr
    assert "scaled down" not in done.stderr, "so many requests were asked for"
    assert not list(runtime_folder.rglob("*.telemetry")), "a socket was left behind"


def test_on_a_cpu_the_bench_is_scaled_down_says_so_and_ends_on_ctrl_c(
    tmp_path: Path, runtime_folder: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    model = tiny_checkpoint("qwen3", max_position_embeddings=4096)
    file = tmp_path / "out.json"
    process = subprocess.Popen(
        [*COMMAND, "--model", str(model), "--device", "cpu", "--json", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(tmp_path, runtime_folder),
    )
    try:
        assert process.stderr is not None
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input-len", "10:5"], "--input-len: expected LOW:HIGH"),
        (["--output-len", "many"], "--output-len: expected LOW:HIGH"),
        (["--output-len", "0"], "--output-len: expected LOW:HIGH"),
        (["--num-requests", "0"], "--num-requests: expected a whole number of at least 1"),
        (["--warmup", "-1"], "--warmup: expected a whole number of at least 0"),
        (["--temperature", "-1"], "--temperature: expected a number from 0 to 100"),
        (["--order", "sideways"], "--order: expected one of"),
        (["--block-size", "0"], "--block-size: expected a whole number"),
    ],
)
def test_wrong_usage_of_bench_gives_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    code, said = usage_error(monkeypatch, capsys, "bench", "throughput", *arguments)
    assert code == 2
    assert said.count("\n") == 1
    assert said.startswith(f"stepscope: error: {message}")


def test_an_unwritable_result_path_is_refused_before_the_bench_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    none = tmp_path / "none"
    for file, why in ((tmp_path, "is a folder"), (none / "out.json", "cannot be written")):
        code, said = usage_error(monkeypatch, capsys, "bench", "throughput", "--json", str(file))
        assert code == 1
        assert said.startswith(f"stepscope: error: {file} {why}")


def test_without_torch_the_bench_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    for name in [each for each in sys.modules if each.startswith("stepscope.engine.execution.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    code, said = usage_error(monkeypatch, capsys, "bench", "throughput")
    assert code == 1
    assert said == (
        "stepscope: error: torch is not installed, and an engine needs it: "
        "pip install 'stepscope[engine]'\n"
    )


def test_the_help_of_bench_has_an_example_and_fits_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["stepscope", "bench", "throughput", "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert "Example:\n    stepscope bench throughput\n" in shown
    assert max(map(len, shown.splitlines())) <= 80
    for option in ("--num-requests", "--input-len", "--model", "--max-num-batched-tokens"):
        assert option in shown


def test_stepscope_bench_alone_lists_its_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["stepscope", "bench"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "throughput" in capsys.readouterr().out
