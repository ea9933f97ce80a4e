"""The bench of a GPU, on a CPU with tiny models: the code a GPU runs, and figures that agree.

The tests check laws (shares follow from the samples, both sides do the same work) and what becomes
of processes that fail, never a time.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from stepscope.engine.models import checkpoint, loader
from stepscope.engine.models.made_checkpoints import RANDOM_PREFIX
from stepscope.engine.protocol.knobs import Batching
from stepscope.engine.simulation.measured import read_points
from stepscope.engine.simulation.model_shape import model_shape
from stepscope.recordings.file.reader import Recording

BENCH = Path(__file__).parents[1] / "bench"
sys.path.append(str(BENCH))

import bench_gpu  # noqa: E402
import gpu_engine  # noqa: E402
import gpu_report  # noqa: E402
from gpu_bench import Bench, NotMeasuredError, sizes  # noqa: E402
from gpu_report import Outcome, Report  # noqa: E402

MODEL = "qwen3-tiny"
QUICK = sizes(is_quick=True)
TINY = (MODEL, "llama-tiny")


def report(**more: Any) -> Report:
    return Report(**{"date": "", "is_gpu": True, "is_quick": False} | more)


# Floors


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("name", TINY)
def test_the_computed_operations_of_a_step_equal_those_counted_by_torch(name: str) -> None:
    folder = checkpoint.locate(RANDOM_PREFIX + name, lambda what, share: None)
    model = AutoModelForCausalLM.from_config(
        loader.load_config(folder, name), attn_implementation="eager"
    )
    count = 24
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, count, dtype=torch.long))
    shape = model_shape(RANDOM_PREFIX + name)
    # The library computes masked values too, and torch counts them.
    unseen = count**2 - gpu_engine.causal_pairs(0, count)
    unseen_flops = gpu_engine.attention_flops(unseen, shape.num_heads, shape.head_dim)
    found = gpu_engine.step_flops(shape, [(0, count)], count) + unseen_flops * shape.num_layers
    assert found == counter.get_total_flops()


# Which process measures what, and processes that fail


def test_no_bench_process_measures_more_than_one_model() -> None:
    models = ["qwen3-0.6b", "qwen3-8b", "llama-3.1-8b"]
    jobs = bench_gpu.plan_jobs("abcdefghij", models, "cuda", {}, is_quick=False)
    assert [(job.parts, job.model, job.is_peer) for job in jobs] == [
        ("ae", None, False),
        ("j", "qwen3-0.6b", False),
        ("g", "qwen3-0.6b", True),
        ("bcdfgi", "qwen3-0.6b", False),
        ("g", "qwen3-8b", True),
        ("bcdfgh", "qwen3-8b", False),
        ("bcd", "llama-3.1-8b", False),
    ]
    # Parts that report shares come after the ceilings.
    first, second = bench_gpu.plan_jobs("bh", ["qwen3-8b"], "cuda", {}, is_quick=True)
    assert (first.parts, second.parts) == ("a", "bh")


WORKER = """
import json, os, sys, time
job, file = json.loads(sys.argv[1]), sys.argv[2]
report = json.load(open(file))
open(file + ".pid", "w").write(str(os.getpid()))
for part in job["parts"]:
    outcome = next(each for each in report["outcomes"] if each["part"] == part)
    outcome["points"].append({"what": "some", "samples": [1.0]})
    if part not in "eh":
        outcome["why"] = None
    json.dump(report, open(file, "w"))
    if part == "e":
        os.abort()
    if part == "h":
        print("hangs", flush=True)
        time.sleep(100)
"""


def run_jobs(parts: tuple[str, ...], file: Path, seconds: float) -> Report:
    jobs = [bench_gpu.Job(parts=each, model=None, device="cpu", is_quick=False) for each in parts]
    worker = [sys.executable, "-c", WORKER]
    made = bench_gpu.conduct(jobs, report(), file, seconds, worker)
    assert gpu_report.read(file) == made
    return made


def test_a_bench_process_that_dies_or_hangs_is_reported_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_gpu, "GRACE_S", 0.5)
    made = run_jobs(("aej", "b", "hi"), tmp_path / "out.json", 12.0)
    why = {outcome.part: outcome.why or "" for outcome in made.outcomes}
    assert why["a"] == why["b"] == ""
    assert "signal 6" in why["e"]
    assert "signal 6" in why["j"]
    assert "its process was ended: it took longer than" in why["h"]
    assert "its process was ended" in why["i"]
    assert [point.what for point in made.outcomes[1].points] == ["some"], "what it told is kept"


def test_a_bench_without_a_gpu_or_with_an_unknown_part_says_what_there_is() -> None:
    for arguments, said in (
        (("--only", "z"), "there is no part 'z'; there are: a (ceilings"),
        (("--only", "a", "--skip", "a"), "leave nothing to measure"),
        (("--models", "gpt"), "there are: qwen3-0.6b"),
        (("--device", "cuda:99"), "torch sees no GPU 'cuda:99'"),
        (("--time-limit", "nan"), "expected 10 seconds or more"),
    ):
        command = [sys.executable, str(BENCH / "bench_gpu.py"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr


def test_a_part_that_fails_or_has_no_time_left_keeps_the_points_it_measured(tmp_path: Path) -> None:
    made = report()
    bench = Bench(torch.device("cpu"), made, tmp_path / "out.json", is_quick=True)
    with bench.part("a", None, 10.0):
        with bench.attempt("one"):
            raise torch.OutOfMemoryError("Tried to allocate 70 GiB\nlong advice")
        with bench.attempt("another"):
            raise NotMeasuredError("no long prompt came")
        bench.found("third", [1.0])
        raise RuntimeError("the driver is gone\nand more")
    with bench.part("b", None, 0.0):
        bench.found("first", [1.0])
        with bench.attempt("second"):
            raise AssertionError("it is not tried")
    failed, late = made.outcomes
    why = ["out of memory: Tried to allocate 70 GiB", "no long prompt came", None]
    assert [point.why for point in failed.points] == why
    assert failed.why == "the driver is gone"
    assert [point.what for point in late.points] == ["first"]
    assert "time ran out" in (late.why or "")
    assert gpu_report.read(tmp_path / "out.json") == made


# The parts


@pytest.fixture(scope="module")
def measured() -> Iterator[tuple[Report, Path]]:
    """A report of every part, each measured once in this process, and its folder."""
    with (
        tempfile.TemporaryDirectory(prefix="step-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("XDG_RUNTIME_DIR", folder)
        patch.setenv("XDG_CACHE_HOME", folder)
        file = Path(folder) / "out.json"
        report(is_gpu=False, is_quick=True).write(file)
        recordings = {"chunked": f"{folder}/chunked.mcap"}
        for job in bench_gpu.plan_jobs("abcdefghij", [MODEL], "cpu", recordings, is_quick=True):
            job.seconds = 600.0
            assert bench_gpu.work(job, file) == 0
        yield gpu_report.read(file), Path(folder)


def of(measured: tuple[Report, Path], part: str) -> Outcome:
    (outcome,) = (each for each in measured[0].outcomes if each.part == part)
    assert outcome.why is None
    assert all(point.why is None for point in outcome.points)
    return outcome


def test_every_part_is_measured_and_its_steps_are_readable_by_simulate(
    measured: tuple[Report, Path],
) -> None:
    made, folder = measured
    assert [outcome.part for outcome in made.outcomes] == list("aejgbcdfhi")
    for outcome in made.outcomes:
        assert of(measured, outcome.part).points
        assert outcome.seconds > 0
    assert (made.device, made.is_gpu) == ("CPU", False)
    assert made.versions["torch"] == torch.__version__
    for part in "bcdfghi":
        assert of(measured, part).settings["implementation"]
    steps = len(QUICK.batches) * len(QUICK.contexts) + len(QUICK.prefills) + len(QUICK.curve)
    (folder / "steps.csv").write_text("\n".join(gpu_report.steps_csv(made, MODEL)))
    assert len(read_points(folder / "steps.csv")) == steps


def test_long_prompts_are_served_in_every_batching_mode_and_recorded(
    measured: tuple[Report, Path],
) -> None:
    outcome = of(measured, "h")
    assert {point.what for point in outcome.points} == set(get_args(Batching))
    most = QUICK.num_streams * QUICK.stream_output
    for point in outcome.points:
        assert len(point.facts["ttft_ms"]) == QUICK.num_arrivals
        figures = [point.facts[f"{name}_ms"] for name in ("p50", "p99", "max")]
        assert figures == sorted(figures)
        assert max(point.samples) == figures[2]
        # Every gap after the first arrival, and no stream has more of them than tokens.
        assert 0 < len(point.samples) < most
    with Recording(measured[1] / "chunked.mcap") as recording:
        assert recording.message is None
        num_steps = (recording.last_step or 0) - (recording.first_step or 0) + 1
    assert QUICK.stream_output <= num_steps < most


def test_tokens_equal_those_of_transformers_and_logits_are_near_those_of_transformers(
    measured: tuple[Report, Path],
) -> None:
    tokens, logits = of(measured, "j").points
    assert tokens.facts["held"] is True
    assert tokens.facts["num_tokens"] == len(QUICK.exact_prompts) * QUICK.exact_tokens
    assert tokens.facts["first_differences"] == [-1] * len(QUICK.exact_prompts)
    assert logits.facts["held"] is True
    errors = (*logits.facts["our_errors"], *logits.facts["their_errors"])
    assert 0 < min(errors) <= max(errors) < 0.1
