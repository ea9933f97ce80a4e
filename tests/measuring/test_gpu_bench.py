"""What `bench gpu` makes of its samples: floors, knee, aims, reports; and processes that fail.

Nothing here measures anything; `test_gpu_bench_parts.py` runs the parts.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from stepscope.engine.bench.gpu import aims, host, results
from stepscope.engine.bench.gpu.conduct import conduct
from stepscope.engine.bench.gpu.costs import Costs, attention_flops, causal_pairs
from stepscope.engine.bench.gpu.knee import find_knee
from stepscope.engine.bench.gpu.parts import (
    PARTS,
    PEER_WEIGHT,
    QUICK_MODELS,
    BenchJob,
    chosen_models,
    chosen_parts,
    plan_jobs,
)
from stepscope.engine.bench.gpu.results import Aim, BenchPoint, PartOutcome, Report
from stepscope.engine.models import loader, random_model
from stepscope.engine.models.model import Model, StepContext
from stepscope.engine.models.random_shapes import PREFIX, SHAPES
from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.kernels.paged_attention import PagedBatch
from stepscope.kernels.reference import ReferenceAttention
from stepscope.tui.cli.__main__ import main
from stepscope.tui.cli.bench.bench_gpu_table import WIDTH, side_by_side, table
from tests.support.cpu_levels import linear_layouts

COMMAND = (sys.executable, "-m", "stepscope.tui.cli", "bench", "gpu")

# ---- floors ----


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def decoder(name: str, dtype: torch.dtype) -> Model:
    """Our decoder with random weights in a shape of the bench."""
    folder = random_model.ensure(PREFIX + name)
    return loader.load_model(
        folder,
        name,
        loader.load_config(folder, name),
        "lean",
        64,
        dtype,
        torch.device("cpu"),
        lambda what, share: None,
    )


@pytest.mark.parametrize("name", QUICK_MODELS)
def test_the_computed_operations_of_a_step_equal_those_counted_by_torch(
    cache: Path, name: str
) -> None:
    folder = random_model.ensure(PREFIX + name)
    model = AutoModelForCausalLM.from_config(
        loader.load_config(folder, name), attn_implementation="eager"
    )
    num_tokens = 24
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, num_tokens, dtype=torch.long), logits_to_keep=1)
    costs = Costs.of(SHAPES[name], itemsize=4)
    # The library computes masked values too, and torch counts them.
    unseen = num_tokens**2 - causal_pairs(0, num_tokens)
    unseen_flops = attention_flops(unseen, costs.num_heads, costs.head_dim) * costs.num_layers
    # It also computes the rest of the last layer for all tokens; our decoder does not (below).
    tail_flops = 2 * costs.tail_weights * (num_tokens - 1)
    found = costs.flops([(0, num_tokens)], 1) + unseen_flops + tail_flops
    assert found == counter.get_total_flops()


@pytest.mark.parametrize("name", QUICK_MODELS)
def test_the_decoder_skips_the_end_of_the_last_layer_for_tokens_without_logits(
    cache: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [*linear_layouts(torch.float32, monkeypatch)][-1] == "plain"  # torch counts only these
    model = decoder(name, torch.float32)
    num_tokens = 24
    shape = (2, 16, model.kv_shape.num_kv_heads, model.kv_shape.head_dim)
    keys, values = ([torch.zeros(shape)] * model.kv_shape.num_layers for _ in range(2))
    counted = []
    for num_logits in (1, num_tokens):
        batch = PagedBatch(
            query_starts=np.array([0, num_tokens]),
            context_lens=np.array([num_tokens]),
            block_tables=np.arange(2)[None],
            slot_mapping=torch.arange(num_tokens),
            block_size=16,
            device=torch.device("cpu"),
        )
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.forward(
                torch.zeros(num_tokens, dtype=torch.int64),
                torch.arange(num_tokens),
                StepContext(batch, keys, values, ReferenceAttention()),
                torch.arange(num_tokens - num_logits, num_tokens),
            )
        counted.append(counter.get_total_flops())
    costs = Costs.of(SHAPES[name], itemsize=4)
    one, every = (costs.flops([(0, num_tokens)], number) for number in (1, num_tokens))
    assert counted[1] - counted[0] == every - one
    assert counted[0] >= one > 0


@pytest.mark.parametrize("name", QUICK_MODELS)
def test_the_bytes_of_a_decode_are_the_used_weights_and_the_keys_and_values(
    cache: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = Costs.of(SHAPES[name], itemsize=2)
    embeddings = SHAPES[name]["vocab_size"] * SHAPES[name]["hidden_size"] * 2
    # With the layouts of weights that a CPU with or without bf16 products has.
    for layout in linear_layouts(torch.bfloat16, monkeypatch):
        model = decoder(name, torch.bfloat16)
        assert model.implementation == f"stepscope decoder, {layout} weights"
        # A head that is tied to the embeddings is the same bytes, unless it was packed.
        is_same = layout == "plain" and SHAPES[name]["tie_word_embeddings"]
        assert costs.weight_bytes == model.weight_bytes - (0 if is_same else embeddings)
        block = model.kv_shape.block_bytes(16)
        assert costs.decode_bytes(3, 16) - costs.weight_bytes == 3 * block


def test_model_shapes_have_the_parameter_counts_in_their_names() -> None:
    for name, billions in (("qwen3-0.6b", 0.6), ("qwen3-8b", 8.2), ("llama-3.1-8b", 8.0)):
        costs = Costs.of(SHAPES[name], itemsize=2)
        untied = 0 if SHAPES[name]["tie_word_embeddings"] else costs.head_weights
        total = costs.layer_weights + costs.norm_weights + costs.head_weights + untied
        assert round(total / 1e9, 1) == billions


@given(
    st.integers(0, 500),
    st.lists(st.integers(1, 60), min_size=1, max_size=6),
)
def test_a_prompt_costs_the_same_operations_in_chunks_of_any_size(
    before: int, chunks: list[int]
) -> None:
    costs = Costs.of(SHAPES["qwen3-8b"], itemsize=2)
    whole = costs.flops([(before, sum(chunks))], num_logits=1)
    sliced = 0
    for i, count in enumerate(chunks):
        sliced += costs.flops([(before + sum(chunks[:i]), count)], num_logits=0)
    assert whole == sliced + costs.flops([], num_logits=1)


# ---- the knee ----


@given(st.floats(0.1, 20.0), st.floats(1e3, 1e6), st.booleans())
def test_the_knee_is_the_batch_size_whose_compute_time_equals_that_of_the_smallest_step(
    flat_ms: float, tokens_per_s: float, adds_up: bool
) -> None:
    knee_tokens = flat_ms / 1e3 * tokens_per_s
    counts = [max(1, round(knee_tokens * share)) for share in (0.002, 0.004, 0.006)]
    counts += [round(knee_tokens * times) + 10 * times for times in (1, 2, 8, 16, 24, 32)]
    counts = sorted({*counts, *range(1, 4)})

    def took_ms(count: int) -> float:
        computing_ms = count / tokens_per_s * 1e3
        return flat_ms + computing_ms if adds_up else max(flat_ms, computing_ms)

    knee = find_knee({count: took_ms(count) for count in counts})
    assert knee is not None
    assert knee.tokens_per_s == pytest.approx(tokens_per_s, rel=0.01)
    slack = max(counts[:3]) / tokens_per_s * 1e3 if adds_up else 0.0
    assert knee.flat_ms == pytest.approx(max(flat_ms, took_ms(counts[1])), abs=slack + 1e-9)
    assert knee.tokens == pytest.approx(knee.flat_ms / 1e3 * tokens_per_s, rel=0.02)
    assert knee.budget >= round(knee.tokens) > knee.budget // 2


def test_without_a_knee_in_the_measured_step_times_none_is_reported() -> None:
    assert find_knee({1: 1.0, 2: 1.0, 4: 1.0}) is None
    assert find_knee({2**i: 5.0 for i in range(12)}) is None


# ---- the aims, and the table ----


def report(**more: Any) -> Report:
    """A report in which every aim is met except the decode shares at batch 128."""

    def step(what: str, ms: float, **facts: Any) -> BenchPoint:
        return BenchPoint(what=what, samples=[ms * 0.99, ms, ms * 1.01], facts=facts)

    def mode(what: str, p99_ms: float) -> BenchPoint:
        return step(what, 8.0, p50_ms=8.0, p99_ms=p99_ms, max_ms=2 * p99_ms, ttft_ms=[700.0])

    def peer(name: str, ms: float) -> BenchPoint:
        work = "256 requests, outputs up to 1024"
        return step(f"{name}, {work}", ms, contender=name, work=work, output_tokens_per_s=1e6 / ms)

    outcomes = [
        PartOutcome(
            part="a",
            points=[
                step("copy", 2.0, bytes=8 << 30),
                step("gemm", 1.4, flops=2 * 8192**3),
            ],
        ),
        PartOutcome(
            part="b",
            model="qwen3-8b",
            points=[
                step("batch 1, context 512", 4.0, floor_bytes=14 << 30, device_ms=[3.8]),
                step("batch 128, context 4096", 40.0, floor_bytes=90 << 30, device_ms=[38.0]),
                BenchPoint(
                    what="batch 256, context 4096", why="out of memory: 70 GiB were asked for"
                ),
            ],
        ),
        PartOutcome(
            part="c", model="qwen3-8b", points=[step("2048 tokens", 60.0, floor_flops=33 * 10**12)]
        ),
        PartOutcome(
            part="g",
            model="qwen3-8b",
            points=[peer("generate_batch", 900.0), peer("stepscope", 300.0)],
        ),
        PartOutcome(
            part="h", model="qwen3-8b", points=[mode("continuous", 600.0), mode("chunked", 60.0)]
        ),
        PartOutcome(
            part="i",
            model="qwen3-0.6b",
            points=[step("with telemetry / without", 500.0, ratios=[1.004, 0.999, 1.02])],
        ),
        PartOutcome(
            part="j",
            model="qwen3-0.6b",
            points=[BenchPoint(what="fp32", facts={"found": 1.0, "wanted": "all", "held": True})],
        ),
    ]
    made = Report(
        date="2026-11-21T12:00:00+00:00",
        is_gpu=True,
        is_quick=False,
        device="NVIDIA Example",
        outcomes=outcomes,
        versions={"torch": "2.11.0", "CUDA": "13.0"},
    )
    for name, value in more.items():
        setattr(made, name, value)
    made.aims = aims.judge(made)
    return made


def test_performance_aims_are_judged_by_the_measured_samples() -> None:
    judged = {aim.what: aim for aim in report().aims}
    held = {what: aim.held for what, aim in judged.items()}
    assert held == {
        "qwen3-8b: decode, batch 1, context 512": True,
        "qwen3-8b: decode, batch 128, context 4096": False,
        "qwen3-8b: prefill of 2048 tokens": True,
        "qwen3-8b: stepscope / generate_batch, 256 requests, outputs up to 1024": True,
        "qwen3-8b: p99 ITL, continuous / chunked": True,
        "qwen3-0.6b: time with telemetry / without": True,
        "qwen3-0.6b: fp32": True,
    }
    found = {what: aim.found for what, aim in judged.items()}
    assert found["qwen3-8b: decode, batch 1, context 512"] == pytest.approx(14 / 8 * 2 / 4)
    assert found["qwen3-8b: p99 ITL, continuous / chunked"] == 10
    assert found["qwen3-0.6b: time with telemetry / without"] == 1.004


def test_an_aim_that_was_not_measured_is_neither_met_nor_missed() -> None:
    made = report()
    for outcome in made.outcomes:
        outcome.points = []
    assert {aim.held for aim in aims.judge(made)} == {None}


@pytest.mark.parametrize("field", ["is_gpu", "is_quick"])
def test_figures_from_a_cpu_or_of_tiny_models_are_not_judged_against_aims(field: str) -> None:
    made = report(**{field: field == "is_quick"})
    assert made.aims == []
    assert any(word in "\n".join(table(made)) for word in ("NOT A GPU", "QUICK"))


def test_the_bench_table_has_every_measured_figure_and_says_why_others_are_missing() -> None:
    lines = list(table(report(is_interrupted=True)))
    text = "\n".join(lines)
    assert max(map(len, lines)) <= WIDTH
    assert "(interrupted)" in lines[0]
    for word in (
        "torch 2.11.0",
        "4.00 88%",
        "(92%)",
        "out of memory: 70 GiB were asked for",
        "3,333 / 1,111 = 3.0x",
        "p99 600",
        "1.004 (0.999 to 1.020, 3 pairs)",
        "not held      qwen3-8b: decode, batch 128, context 4096: 0.56 (70% or more)",
    ):
        assert word in text, text


def test_bench_show_prints_the_table_of_a_file_and_two_files_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    slower = report(device="NVIDIA Other")
    for point in slower.outcomes[1].points:
        point.samples = [2 * each for each in point.samples]
    slower.outcomes.append(PartOutcome(part="e", why="its process ended by signal 9"))
    for made, file in zip((report(), slower), files, strict=True):
        results.write(made, file)
        assert results.read(file) == made

    def shown(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["stepscope", "bench", "gpu", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert not ended.value.code, said.err
        return said.out

    assert shown("--show", str(files[0])).splitlines() == list(table(report()))
    both = shown("--show", str(files[0]), str(files[1]))
    assert both.splitlines() == list(side_by_side(report(), slower))
    (line,) = (line for line in both.splitlines() if "batch 1, context 512" in line)
    assert " ".join(line.split()) == (
        "qwen3-8b: batch 1, context 512 4.00 88% (92%) 8.00 44% (92%) 2.00"
    )
    assert "2: not measured: its process ended by signal 9" in both


def test_a_file_that_is_no_bench_report_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    with pytest.raises(ConfigError, match=r"x\.json cannot be read"):
        results.read(file)
    file.write_text("{}")
    with pytest.raises(ConfigError, match=r"x\.json is no report"):
        results.read(file)
    later = {"date": "", "is_gpu": True, "is_quick": False, "format": results.FORMAT + 1}
    file.write_text(json.dumps(later))
    with pytest.raises(ConfigError, match="use the version that wrote it"):
        results.read(file)


# ---- which process measures what ----


def test_no_bench_process_measures_more_than_one_model() -> None:
    models = ["qwen3-0.6b", "qwen3-8b", "llama-3.1-8b"]
    jobs = plan_jobs("".join(PARTS), models, "cuda", is_quick=False, for_mode={})
    assert [(job.parts, job.model, job.is_peer) for job in jobs] == [
        ("ae", None, False),
        ("j", "qwen3-0.6b", False),
        ("g", "qwen3-0.6b", True),
        ("bcdfgi", "qwen3-0.6b", False),
        ("g", "qwen3-8b", True),
        ("bcdfgh", "qwen3-8b", False),
        ("bcd", "llama-3.1-8b", False),
    ]
    assert jobs[2].part_weight("g") == PEER_WEIGHT


def test_bench_parts_that_report_shares_run_after_the_ceilings_are_measured() -> None:
    (first, second) = plan_jobs("bh", ["qwen3-8b"], "cuda", is_quick=True, for_mode={})
    assert (first.parts, second.parts) == ("a", "bh")
    assert chosen_parts("b, d,a", "a") == "bd"
    assert chosen_models("qwen3-8b,llama-tiny", is_quick=False) == ["qwen3-8b", "llama-tiny"]
    assert chosen_models(None, is_quick=True) == list(QUICK_MODELS)


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda: chosen_parts("z", None), r"--only: there is no part 'z'.*a \(ceilings"),
        (lambda: chosen_parts("a", "a"), "leave nothing"),
        (lambda: chosen_models("gpt", is_quick=False), "no shape is called 'gpt'.*qwen3-0.6b"),
    ],
)
def test_an_unknown_bench_part_or_model_is_refused_with_the_known_ones(
    choose: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose()


# ---- processes that fail ----

WORKER = """
import json, os, sys, time
job = json.loads(sys.stdin.readline())
def tell(**message): print(json.dumps(message), flush=True)
tell(type="Hello", device="Example", is_gpu=True, versions={"torch": "1"})
for part in job["parts"]:
    tell(type="Begun", part=part, model=job["model"])
    tell(type="Found", point={"what": "some", "samples": [1.0]})
    if part == "e":
        sys.stderr.write("illegal memory access\\n")
        os.abort()
    if part == "h":
        time.sleep(100)
    tell(type="Ended", seconds=1.0, why=None, settings={"of": part})
"""


def empty_report() -> Report:
    return Report(date="", is_gpu=True, is_quick=False)


def run_jobs(jobs: list[BenchJob], made: Report, file: Path, seconds: float = 60.0) -> list[str]:
    told: list[str] = []
    conduct(
        jobs,
        made,
        seconds,
        progress=lambda what, share, detail: told.append(what),
        save=lambda so_far: results.write(so_far, file),
        worker=(sys.executable, "-c", WORKER),
    )
    return told


def test_a_bench_process_that_dies_or_hangs_is_reported_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepscope.engine.bench.gpu.conduct.GRACE_S", 0.5)
    jobs = [
        BenchJob(parts=parts, model=None, device="cuda", is_quick=False)
        for parts in ("aej", "hi", "b")
    ]
    made = empty_report()
    told = run_jobs(jobs, made, tmp_path / "out.json", seconds=4.0)
    why = {outcome.part: outcome.why for outcome in made.outcomes}
    assert why["a"] is None
    assert why["b"] is None
    assert "signal 6: illegal memory access" in (why["e"] or "")
    assert "signal 6" in (why["j"] or "")
    assert "its process was ended: it took longer than" in (why["h"] or "")
    assert "its process was ended" in (why["i"] or "")
    assert made.outcomes[0].settings == {"of": "a"}
    assert [point.what for point in made.outcomes[1].points] == ["some"], "what it told is kept"
    assert (made.device, made.versions) == ("Example", {"torch": "1"})
    assert results.read(tmp_path / "out.json") == made
    assert any(line.startswith("(a) ceilings") and "3 to come" in line for line in told)


def test_bench_parts_without_time_left_are_reported_as_skipped(tmp_path: Path) -> None:
    made = empty_report()
    run_jobs(
        [BenchJob(parts="ab", model="qwen3-8b", device="cuda", is_quick=False)],
        made,
        tmp_path / "out.json",
        seconds=1e-9,
    )
    assert {outcome.why for outcome in made.outcomes} == {
        "no time was left for it (see --time-limit)"
    }


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_gpu_bench_leaves_a_complete_report_and_no_process(
    tmp_path: Path, number: signal.Signals
) -> None:
    file = tmp_path / "out.json"
    script = tmp_path / "worker.py"
    script.write_text(f"import os\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n")
    script.write_text(script.read_text() + WORKER)
    code = (
        "import sys\n"
        "from stepscope.engine.bench.gpu import conduct\n"
        "from stepscope.tui.cli.__main__ import main\n"
        "from stepscope.tui.cli.bench import bench_gpu\n"
        f"command = (sys.executable, {str(script)!r})\n"
        "from functools import partial\n"
        "bench_gpu.conduct = partial(conduct.conduct, worker=command)\n"
        f"sys.argv = ['stepscope', 'bench', 'gpu', '--device', 'cpu', '--only', 'a,h', '-o', "
        f"{str(file)!r}]\n"
        "main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("(h)"):
            break
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130, said
    assert "interrupted" in said
    made = results.read(file)
    assert made.is_interrupted
    assert {o.part: o.why for o in made.outcomes} == {"a": None, "h": "it was interrupted"}
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_without_a_gpu_bench_gpu_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("stepscope.engine.bench.gpu.host.gpu_name", lambda device: None)
    monkeypatch.setattr(sys, "argv", ["stepscope", "bench", "gpu"])
    with pytest.raises(SystemExit):
        main()
    assert "torch sees no GPU 'cuda'" in capsys.readouterr().err


def test_bench_gpu_measures_in_a_separate_process_and_writes_a_report_file(tmp_path: Path) -> None:
    done = subprocess.run(
        (*COMMAND, "--device", "cpu", "--only", "a"),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("bench-gpu-*-cpu.json")
    made = results.read(file)
    assert [point.what for point in made.outcomes[0].points] == ["copy", "gemm"]
    assert made.versions["torch"] == torch.__version__
    assert made.host["python"]
    assert made.settings["parts"] == "a"
    assert done.stdout.splitlines() == list(table(made))
    assert "and nothing of a GPU" in done.stderr
    assert "(a) ceilings" in done.stderr


def test_a_measuring_process_ends_with_its_parent() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "stepscope.engine.bench.gpu.measure.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    job = BenchJob(parts="bcdh", model="llama-tiny", device="cpu", is_quick=True, seconds=100.0)
    process.stdin.write(msgspec.json.encode(job) + b"\n")
    process.stdin.close()
    assert process.wait(timeout=30) == 1


def test_judged_aims_survive_writing_and_reading_a_report(tmp_path: Path) -> None:
    made = report()
    made.aims = [Aim(what="x", wanted="y", found=1.0, held=True)]
    results.write(made, tmp_path / "a.json")
    assert results.read(tmp_path / "a.json").aims == made.aims


def test_a_report_of_a_checkout_names_its_commit() -> None:
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        pytest.skip("this is no checkout")
    command = ("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    head = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert (host.commit() or "").removesuffix(", and changes") == head
