"""`stepscope simulate --steps`: which requests would be in which step, for scripts."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from stepscope.engine.protocol.settings.knobs import Batching, Knobs
from stepscope.engine.simulation.dry_run import ScheduleLine
from stepscope.tui.cli.__main__ import main

RECORDED = Path(__file__).parents[1] / "conformance"
PREEMPTION = str(RECORDED / "02-preemption.json")


@dataclass
class Done:
    """A command that has ended."""

    exit_code: int
    stdout: str
    stderr: str

    def lines(self) -> list[ScheduleLine]:
        assert (self.exit_code, self.stderr) == (0, "")
        return [msgspec.json.decode(line, type=ScheduleLine) for line in self.stdout.splitlines()]

    def error(self) -> str:
        """The error, which must be a single line and the only output."""
        assert self.stdout == ""
        assert self.stderr.startswith("stepscope: error: ")
        assert self.stderr.count("\n") == 1
        assert "bug" not in self.stderr
        return self.stderr


Run = Callable[..., Done]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `stepscope simulate --steps ARGUMENTS` beside a config file that must have no effect."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "stepscope").mkdir()
    (tmp_path / "stepscope" / "config.toml").write_text("[knobs]\nmax_num_seqs = 1\n")

    def schedule(*arguments: str, stdin: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "argv", ["stepscope", "simulate", "--steps", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return Done(int(ended.value.code or 0), said.out, said.err)

    return schedule


def workload(**changes: object) -> dict[str, object]:
    requests = [{"arrival_step": 0, "prompt_len": 10, "output_len": 3} for _ in range(3)]
    return {"num_blocks": 100, "block_size": 4, "requests": requests, **changes}


def test_schedule_prints_one_line_per_step_in_the_format_of_the_recordings(run: Run) -> None:
    text = run(PREEMPTION, "--order", "arrival").stdout
    recorded = (RECORDED / "02-preemption.steps.jsonl").read_text()
    assert list(json.loads(text.splitlines()[0])) == list(json.loads(recorded.splitlines()[0]))
    assert text == recorded


def test_schedule_reads_a_workload_from_standard_input(run: Run) -> None:
    assert run("-", stdin=Path(PREEMPTION).read_bytes()).stdout == run(PREEMPTION).stdout


def test_options_of_schedule_win_over_the_workload_and_the_config_file_is_ignored(run: Run) -> None:
    document = json.dumps(workload(max_num_seqs=2)).encode()
    assert list(run("-", stdin=document).lines()[0].sched) == ["0", "1"]
    assert list(run("-", "--max-num-seqs", "3", stdin=document).lines()[0].sched) == ["0", "1", "2"]
    first = run("-", "--max-num-batched-tokens", "4", "--num-blocks", "6", stdin=document).lines()
    assert (first[0].sched, first[0].free_blocks) == ({"0": 4}, 4)
    whole = run(
        "-", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "13", stdin=document
    )
    assert whole.lines()[0].sched == {"0": 10}


def test_budget_changes_of_a_workload_apply_whatever_the_initial_budget(run: Run) -> None:
    document = json.dumps(workload(budget={"1": 2}, max_num_batched_tokens=5)).encode()
    lines = run("-", "--max-num-batched-tokens", "8", stdin=document).lines()
    assert [line.total for line in lines[:3]] == [8, 2, 2]


@pytest.mark.parametrize("knob", sorted(Knobs.__struct_fields__))
def test_every_knob_is_an_option_of_schedule_and_a_field_of_the_workload(
    run: Run, knob: str
) -> None:
    value = Knobs().as_dict()[knob]
    text = str(value).lower() if isinstance(value, bool) else str(value)
    option = [f"--{knob.replace('_', '-')}"] + ([] if isinstance(value, bool) else [text])
    by_option = run("-", *option, stdin=json.dumps(workload()).encode())
    by_field = run("-", stdin=json.dumps(workload(**{knob: value})).encode())
    assert by_option.stdout == by_field.stdout
    assert by_option.lines()


@pytest.mark.parametrize("batching", get_args(Batching))
def test_the_summary_counts_steps_tokens_padding_and_preemptions(run: Run, batching: str) -> None:
    done = run(PREEMPTION, "--summary", "--batching", batching)
    assert (done.exit_code, done.stderr) == (0, "")
    table = {line[:12].strip(): line[13:] for line in done.stdout.splitlines()}
    lines = run(PREEMPTION, "--batching", batching).lines()
    assert table["steps"] == f"{sum(1 for line in lines if line.total)} with work"
    assert table["tokens"].startswith(f"{sum(line.total for line in lines):,}: ")
    assert table["padding"].startswith(f"{sum(line.padded for line in lines):,} tokens")
    assert table["preemptions"].startswith(f"{sum(len(line.preempted) for line in lines)}, ")
    num_recomputed = sum(line.total for line in lines) - sum(
        request["prompt_len"] + request["output_len"] - 1
        for request in json.loads(Path(PREEMPTION).read_text())["requests"]
    )
    assert table["preemptions"].endswith(f"{num_recomputed} tokens recomputed")
    assert table["TTFT"].startswith("p50 ")


def test_a_summary_counts_latencies_in_steps(run: Run) -> None:
    # Request 1 arrives in step 1, waits for the seat until step 3, and has its prompt in two steps.
    requests = [
        {"arrival_step": 0, "prompt_len": 4, "output_len": 3},
        {"arrival_step": 1, "prompt_len": 8, "output_len": 2},
    ]
    document = json.dumps(workload(requests=requests, max_num_seqs=1, max_num_batched_tokens=5))
    table = run("-", "--summary", stdin=document.encode()).stdout.splitlines()
    assert "TTFT         p50 1  p99 4  max 4 steps" in table
    assert "ITL          p50 1  p99 1  max 1 steps" in table
    assert "steps        6 with work" in table
    assert "budget used  50.0% on average" in table  # 15 tokens of 6 x 5


def test_the_summary_of_a_workload_without_requests_says_no_sample(run: Run) -> None:
    done = run("-", "--summary", stdin=json.dumps(workload(requests=[])).encode())
    assert "TTFT         no sample" in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("arguments", "stdin", "exit_code", "said"),
    [
        ([], b"", 2, "--steps: name a workload"),
        (["never-there.json"], b"", 1, "never-there.json: No such file"),
        (["."], b"", 1, ".: Is a directory"),
        (["-"], b"{", 1, "standard input: "),
        (
            ["-"],
            b'{"num_blocks": 3, "requests": [{}]}',
            1,
            "requests[0].arrival_step: this field is required",
        ),
        (["-", "--batching", "dynamic"], b"{}", 2, "--batching: expected one of naive, static"),
        (["-", "--watermark", "0.9"], b"{}", 2, "--watermark: expected a number of at least 0"),
        (["-", "--num-blocks", "many"], b"{}", 2, "--num-blocks"),
        ([PREEMPTION, "--num-blocks", "4"], b"", 1, "request 0 can never finish"),
        (
            [PREEMPTION, "--num-blocks", "1"],
            b"",
            2,
            "--num-blocks: expected a whole number of at least 2",
        ),
        (["-"], b'{"order": "fifo"}', 1, "order is one of decode_first, arrival, not 'fifo'"),
    ],
)
def test_an_impossible_workload_gives_a_one_line_error(
    run: Run, arguments: list[str], stdin: bytes, exit_code: int, said: str
) -> None:
    done = run(*arguments, stdin=stdin)
    assert done.exit_code == exit_code
    assert said in done.error()


def test_schedule_ends_quietly_when_its_reader_closes_the_pipe() -> None:
    command = [
        sys.executable,
        "-m",
        "stepscope.tui.cli",
        "simulate",
        "--steps",
        PREEMPTION,
        "--batching=naive",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["step"] == 0
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=30) == 0


def test_schedule_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    command = [sys.executable, "-m", "stepscope.tui.cli", "simulate", "--steps", PREEMPTION]
    environment = {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_schedule_summarises_a_workload_in_all_batching_modes_in_one_table(run: Run) -> None:
    table = run(PREEMPTION, "--summary", "--modes", "all").stdout.splitlines()
    assert table[0].startswith("mode        TTFT p50 steps")
    assert [line.split()[0] for line in table[1:]] == list(get_args(Batching))
    found = json.loads(run(PREEMPTION, "--summary", "--modes", "naive,chunked", "--json").stdout)
    assert found["naive"]["num_preemptions"] == 0 < found["chunked"]["num_preemptions"]


def test_with_a_gpu_model_the_summary_is_in_milliseconds(run: Run) -> None:
    lines = run(PREEMPTION, "--summary", "--gpu", "h100").stdout.splitlines()
    steps = json.loads(run(PREEMPTION, "--summary", "--json", "--gpu", "h100").stdout)[""]
    assert lines[-1].startswith("ITL ms       p50 ")
    assert steps["ttft_p50_ms"] > steps["ttft_p50_steps"] * 3  # no step takes less than 3 ms


def test_the_requests_of_a_recording_are_scheduled_in_several_batching_modes(run: Run) -> None:
    done = run("chunked", "--summary", "--modes", "naive,chunked", "--json")
    assert done.stderr.splitlines() == ["simulating naive", "simulating chunked"]
    found = json.loads(done.stdout)
    assert found["naive"]["ttft_p50_ms"] > found["chunked"]["ttft_p50_ms"]


def test_modes_and_knob_values_are_crossed_and_each_has_its_interval_over_seeds(run: Run) -> None:
    crossed = ("--summary", "--modes", "naive,chunked", "--sweep", "max_num_seqs=4..8", "--json")
    found = json.loads(run("chunked", *crossed, "--runs", "2").stdout)
    assert list(found) == [
        f"{mode} max_num_seqs={seats}" for mode in ("naive", "chunked") for seats in (4, 8)
    ]
    ttft = found["chunked max_num_seqs=4"]["ttft_p50_ms"]
    assert ttft["low"] < ttft["median"] < ttft["high"]
    steps = json.loads(run(PREEMPTION, *crossed).stdout)
    assert list(steps) == list(found)


@pytest.mark.parametrize("source", ["mix", "freeze", "trace.csv"])
def test_steps_of_work_that_counts_in_seconds_are_refused(run: Run, source: str) -> None:
    done = run(source)
    assert done.exit_code == 2
    assert f"{source} counts in seconds, not in steps: -o FILE.mcap" in done.error()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--modes", "all"), "leave out --json, --modes, --sweep"),
        (("--summary", "--sweep", "seats=1..2"), "'seats' is no knob; the knobs are"),
        (("--summary", "--runs", "2"), "has no chance in it"),
        (("--summary", "--modes", "fast"), "expected all, or some of naive, static"),
        (("--json",), "each step is a line of JSON"),
        (("--gpu", "h100"), "it needs no step times; leave out --gpu"),
        (("--summary", "-o", "x.mcap"), "--output: not with"),
    ],
)
def test_conflicting_options_of_schedule_are_refused(
    run: Run, arguments: tuple[str, ...], expected: str
) -> None:
    assert expected in run(PREEMPTION, *arguments).error()
