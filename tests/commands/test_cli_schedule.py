"""`stepscope simulate --steps`: which requests would be in which step, for scripts."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.simulation.dry_run import ScheduleLine
from tests.support.done import Done

RECORDED = Path(__file__).parents[1] / "conformance"
PREEMPTION = str(RECORDED / "02-preemption.json")


Run = Callable[..., Done]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stepscope: Run) -> Run:
    """Runs `stepscope simulate --steps ARGUMENTS` beside a config file that must have no effect."""
    (tmp_path / "config" / "stepscope").mkdir(parents=True)
    (tmp_path / "config" / "stepscope" / "config.toml").write_text("[knobs]\nmax_num_seqs = 1\n")

    def schedule(*arguments: str, stdin: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        return stepscope("simulate", "--steps", *arguments)

    return schedule


def lines_of(done: Done) -> list[ScheduleLine]:
    assert (done.exit_code, done.stderr) == (0, "")
    return [msgspec.json.decode(line, type=ScheduleLine) for line in done.stdout.splitlines()]


def error_of(done: Done) -> str:
    """The error, which must be a single line and the only output."""
    assert done.stdout == ""
    assert done.stderr.startswith("stepscope: error: ")
    assert done.stderr.count("\n") == 1
    assert "bug" not in done.stderr
    return done.stderr


def workload(**changes: object) -> dict[str, object]:
    requests = [{"arrival_step": 0, "prompt_len": 10, "output_len": 3} for _ in range(3)]
    return {"num_blocks": 100, "block_size": 4, "requests": requests, **changes}


def test_schedule_prints_one_line_per_step_in_the_format_of_the_recordings(run: Run) -> None:
    recorded = (RECORDED / "02-preemption.steps.jsonl").read_text()
    assert run(PREEMPTION, "--order", "arrival").stdout == recorded
    assert run("-", stdin=Path(PREEMPTION).read_bytes()).stdout == run(PREEMPTION).stdout


def test_options_of_schedule_win_over_the_workload_and_the_config_file_is_ignored(run: Run) -> None:
    document = json.dumps(workload(max_num_seqs=2)).encode()
    for options, ids in (([], ["0", "1"]), (["--max-num-seqs", "3"], ["0", "1", "2"])):
        assert list(lines_of(run("-", *options, stdin=document))[0].sched) == ids
    first = lines_of(run("-", "--max-num-batched-tokens", "4", "--num-blocks", "6", stdin=document))
    assert (first[0].sched, first[0].free_blocks) == ({"0": 4}, 4)
    whole = run(
        "-", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "13", stdin=document
    )
    assert lines_of(whole)[0].sched == {"0": 10}


def test_budget_changes_of_a_workload_apply_whatever_the_initial_budget(run: Run) -> None:
    document = json.dumps(workload(budget={"1": 2}, max_num_batched_tokens=5)).encode()
    lines = lines_of(run("-", "--max-num-batched-tokens", "8", stdin=document))
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
    assert lines_of(by_option)


@pytest.mark.parametrize(
    ("arguments", "stdin", "exit_code", "said"),
    [
        (["-"], b"{", 1, "standard input: "),
        (["-"], b'{"num_blocks": 3, "requests": [{}]}', 1, "requests[0].arrival_step: this field"),
        (["-", "--batching", "dynamic"], b"{}", 2, "--batching: expected one of naive, static"),
        (["-", "--watermark", "0.9"], b"{}", 2, "--watermark: expected a number of at least 0"),
        (["-", "--num-blocks", "many"], b"{}", 2, "--num-blocks"),
        ([PREEMPTION, "--num-blocks", "4"], b"", 1, "request 0 can never finish"),
        ([PREEMPTION, "--num-blocks", "1"], b"", 2, "--num-blocks: expected a whole number of at"),
        (["-"], b'{"order": "fifo"}', 1, "order: invalid enum value 'fifo'"),
    ],
)
def test_an_impossible_workload_gives_a_one_line_error(
    run: Run, arguments: list[str], stdin: bytes, exit_code: int, said: str
) -> None:
    done = run(*arguments, stdin=stdin)
    assert done.exit_code == exit_code
    assert said in error_of(done)


def test_schedule_ends_quietly_when_its_reader_closes_the_pipe() -> None:
    command = [sys.executable, "-m", "stepscope.tui.cli", "simulate", "--steps", PREEMPTION]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
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


def test_modes_and_knob_values_are_crossed_and_each_has_its_interval_over_seeds(
    stepscope: Run,
) -> None:
    crossed = ("--sweep", "batching=naive,chunked", "--sweep", "max_num_seqs=4..8")
    done = stepscope("simulate", "chunked", *crossed, "--json", "--runs", "2")
    found = json.loads(done.stdout)
    names = [
        f"batching={mode} max_num_seqs={seats}" for mode in ("naive", "chunked") for seats in (4, 8)
    ]
    said = [line.partition(":")[0] for line in done.stderr.splitlines()]
    assert said == [f"simulating {name}" for name in names]
    assert list(found) == names
    ttft = found["batching=chunked max_num_seqs=4"]["ttft_p50_ms"]
    assert ttft["low"] < ttft["median"] < ttft["high"]
    table = stepscope("simulate", "chunked", *crossed[:2]).stdout.splitlines()
    assert table[0].startswith("with              TTFT p50 ms")
    assert [line.split()[0] for line in table[1:]] == ["batching=naive", "batching=chunked"]
    ttft_ms = {line.split()[0]: float(line.split()[1].replace(",", "")) for line in table[1:]}
    assert ttft_ms["batching=naive"] > ttft_ms["batching=chunked"]
