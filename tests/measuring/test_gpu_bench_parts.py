"""The parts of `bench gpu` on a CPU with tiny models: the code a GPU runs, and figures that agree.

The tests check laws (every step has its samples, shares follow from them, both sides do the same
work), never a time.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from stepscope.engine.bench.gpu import aims
from stepscope.engine.bench.gpu.costs import Costs
from stepscope.engine.bench.gpu.gather import Gatherer
from stepscope.engine.bench.gpu.measure import ceilings, worker
from stepscope.engine.bench.gpu.measure.bench import Bench, NotMeasuredError
from stepscope.engine.bench.gpu.measure.timing import Stopwatch
from stepscope.engine.bench.gpu.parts import QUICK, BenchJob, Message, PeerWork, Sizes
from stepscope.engine.bench.gpu.results import BenchPoint, PartOutcome, Report
from stepscope.engine.models import loader, random_model
from stepscope.engine.models.random_shapes import SHAPES
from stepscope.engine.models.random_weights import RandomWeights
from stepscope.engine.process.serve import open_engine
from stepscope.engine.protocol.settings.engine_config import EngineConfig
from stepscope.engine.protocol.settings.knobs import Batching, ConfigError, Knobs
from stepscope.recordings.file.reader import Recording
from stepscope.tui.cli.bench.bench_gpu import RECORDER

MODEL = "qwen3-tiny"
PEER = PeerWork(num_requests=4, most_output=9)


def job(parts: str, model: str | None, **more: Any) -> BenchJob:
    return BenchJob(parts=parts, model=model, device="cpu", is_quick=True, seconds=600.0, **more)


@pytest.fixture(scope="module")
def measured() -> Iterator[Report]:
    """A report of every part, each measured once in this process."""
    with (
        tempfile.TemporaryDirectory(prefix="step-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("XDG_RUNTIME_DIR", folder)
        patch.setenv("XDG_CACHE_HOME", folder)
        made = Report(date="", is_gpu=False, is_quick=True)
        for each in (
            job("ae", None),
            job("j", MODEL),
            job("g", MODEL, is_peer=True),
            job(
                "bcdfghi",
                MODEL,
                peer_works=[PEER],
                recorder=RECORDER,
                recordings={"chunked": f"{folder}/chunked.mcap"},
            ),
        ):
            gatherer = Gatherer(each, made)
            worker.run(each, gatherer.take)
            gatherer.end("")
        # Read while it is there: part h says what was to be recorded, this what was.
        with Recording(Path(folder) / "chunked.mcap") as recording:
            assert recording.message is None
            made.settings["recorded_steps"] = (recording.last_step or 0) - (
                recording.first_step or 0
            )
        yield made


def of(report: Report, part: str) -> PartOutcome:
    (outcome,) = report.of(part)
    assert outcome.why is None
    assert all(point.why is None for point in outcome.points)
    return outcome


def test_every_bench_part_is_measured_and_reports_its_settings(measured: Report) -> None:
    assert [outcome.part for outcome in measured.outcomes] == list("aejgbcdfhi")
    for outcome in measured.outcomes:
        assert of(measured, outcome.part).points
        assert outcome.seconds > 0
    assert measured.device == "CPU"
    assert measured.is_gpu is False
    assert measured.versions["torch"] == torch.__version__
    assert measured.versions["CUDA"] == (torch.version.cuda or "none")
    assert measured.versions["flash-attn"]
    for part in "bcdfhi":
        assert of(measured, part).settings["implementation"]
        assert of(measured, part).settings["attention"] in ("cpu", "torch")


def test_the_ceilings_are_rates_of_bytes_moved_and_operations_done(measured: Report) -> None:
    copy, gemm = of(measured, "a").points
    assert measured.bytes_per_s == pytest.approx(2 * QUICK.copy_bytes / (copy.median or 0) * 1e3)
    assert measured.flops_per_s == pytest.approx(
        2 * QUICK.product_side**3 / (gemm.median or 0) * 1e3
    )
    assert len(copy.samples) == len(gemm.samples) == QUICK.num_samples


def test_the_bandwidth_share_of_a_decode_step_is_its_least_time_over_its_median(
    measured: Report,
) -> None:
    costs = Costs.of(
        SHAPES[MODEL], itemsize=2 if of(measured, "b").settings["dtype"] != "float32" else 4
    )
    decodes = of(measured, "b").points
    assert len(decodes) == len(QUICK.batches) * len(QUICK.contexts)
    for point in decodes:
        batch, context = point.number("batch"), point.number("context")
        assert batch is not None
        assert context is not None
        assert point.number("floor_bytes") == costs.decode_bytes(int(batch), int(context))
    for count, point in zip(QUICK.prefills, of(measured, "c").points, strict=True):
        assert point.number("floor_flops") == costs.flops([(0, count)], 1)
    assert [point.number("tokens") for point in of(measured, "d").points] == list(QUICK.curve)
    for point in (*decodes, *of(measured, "c").points, *of(measured, "d").points):
        assert len(point.samples) == QUICK.num_samples
        assert min(point.samples) > 0
        assert len(point.numbers("alone_ms")) > 1
        assert point.numbers("device_ms") == []
    for point in decodes:
        share = aims.share_of_floor(measured, point)
        assert share == pytest.approx(
            (point.number("floor_bytes") or 0)
            / (measured.bytes_per_s or 1)
            / (point.median or 1)
            * 1e3
        )


def test_each_kernel_is_measured_on_each_case_it_supports(measured: Report) -> None:
    points = of(measured, "e").points
    cases: dict[str, set[str]] = {}
    for point in points:
        cases.setdefault(str(point.facts["case"]), set()).add(str(point.facts["contender"]))
    attention = {name: who for name, who in cases.items() if "heads" in name}
    assert len(attention) == 12
    assert all("torch" in who and "reference" not in who for who in attention.values())
    assert {"SDPA, dense" in who for name, who in attention.items() if "x" in name} == {True}
    others = [who for name, who in cases.items() if name not in attention]
    assert others == [{"ours", "plain torch"}] * 3


def test_the_throughput_run_is_complete_and_not_compared_with_a_peer_of_other_work(
    measured: Report,
) -> None:
    (yardstick,) = of(measured, "f").points
    assert yardstick.what == f"{QUICK.yardstick_requests} requests"
    assert yardstick.facts["is_partial"] is False
    assert yardstick.number("output_tokens_per_s") == pytest.approx(
        (yardstick.number("num_output_tokens") or 0) / (yardstick.median or 1) * 1e3
    )
    theirs, ours = of(measured, "g").points
    assert theirs.facts["work"] == "4 requests, outputs up to 24"
    assert "sdpa" in str(theirs.facts["attention"])
    assert "use_cuda_graph" in theirs.facts
    # Here our side does other work: it is not compared with theirs.
    assert ours.facts["work"] == PEER.in_words
    assert 0 < (ours.number("num_output_tokens") or 0) <= 4 * 9
    assert [pair for _, pair in aims.pairs(of(measured, "g"))] == [None]


def test_long_prompts_are_served_in_every_batching_mode(measured: Report) -> None:
    outcome = of(measured, "h")
    assert {point.what for point in outcome.points} == set(get_args(Batching))
    for point in outcome.points:
        assert len(point.numbers("ttft_ms")) == QUICK.num_arrivals
        figures = [point.number(f"{name}_ms") or 0 for name in ("p50", "p99", "max")]
        assert figures == sorted(figures)
        assert max(point.samples) == figures[2]
        # Every gap after the first arrival, and no stream has more of them than tokens.
        assert 0 < len(point.samples) < QUICK.num_streams * QUICK.stream_output
    assert aims.itl_ratio(outcome) is not None
    recorded = made_steps(measured)  # from the first to the last
    assert QUICK.stream_output <= recorded + 1 < QUICK.num_streams * QUICK.stream_output


def made_steps(measured: Report) -> int:
    """The steps made for the recorded mode."""
    steps = measured.settings["recorded_steps"]
    assert isinstance(steps, int)
    return steps


def test_telemetry_cost_is_measured_in_pairs_of_runs_with_and_without_telemetry(
    measured: Report,
) -> None:
    (point,) = of(measured, "i").points
    with_ms, without_ms = point.samples, point.numbers("without_ms")
    assert len(with_ms) == len(without_ms) == QUICK.telemetry_pairs
    assert point.numbers("ratios") == pytest.approx(
        [a / b for a, b in zip(with_ms, without_ms, strict=True)]
    )
    # One record a step of half of the runs, the warm-up and signs of life beside.
    steps = (QUICK.telemetry_pairs + 1) * QUICK.telemetry_output
    assert (point.number("num_received") or 0) >= steps
    assert point.number("num_gaps") == 0


def test_tokens_equal_those_of_transformers_and_logits_are_near_those_of_transformers(
    measured: Report,
) -> None:
    tokens, logits = of(measured, "j").points
    assert tokens.facts["held"] is True
    assert tokens.number("num_tokens") == len(QUICK.exact_prompts) * QUICK.exact_tokens
    assert tokens.facts["first_differences"] == [-1] * len(QUICK.exact_prompts)
    assert logits.facts["held"] is True
    errors = (*logits.numbers("our_errors"), *logits.numbers("their_errors"))
    assert 0 < min(errors) <= max(errors) < 0.1


# ---- what goes wrong ----


def collected() -> tuple[Report, Callable[[Message], None]]:
    made = Report(date="", is_gpu=False, is_quick=True)
    return made, Gatherer(job("ab", None), made).take


def test_a_measurement_that_runs_out_of_memory_is_reported_and_the_next_one_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, tell = collected()
    bench = Bench(torch.device("cpu"), QUICK, tell)

    def no_memory(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 70 GiB\nlong advice")

    with monkeypatch.context() as patch, bench.part("a", None, 10.0):
        patch.setattr(torch, "empty_like", no_memory)
        ceilings.measure(bench)
    (outcome,) = made.outcomes
    assert [point.why for point in outcome.points] == [
        "out of memory: Tried to allocate 70 GiB"
    ] * 2
    with bench.part("b", None, 10.0):
        with bench.attempt("one mode"):
            raise NotMeasuredError("no long prompt came")
        bench.found("another mode", [1.0])
        raise RuntimeError("the driver is gone\nand more")
    assert [outcome.why for outcome in made.outcomes] == [None, "the driver is gone"]
    assert [point.why for point in made.outcomes[1].points] == ["no long prompt came", None]


def test_a_bench_part_whose_time_is_up_keeps_the_points_it_measured() -> None:
    made, tell = collected()
    bench = Bench(torch.device("cpu"), QUICK, tell)
    with bench.part("b", None, 0.0):
        bench.found("first", [1.0])
        with bench.attempt("second"):
            raise AssertionError("it is not tried")
    (outcome,) = made.outcomes
    assert [point.what for point in outcome.points] == ["first"]
    assert "time ran out" in (outcome.why or "")


def test_a_step_that_was_cut_for_lack_of_memory_is_no_sample() -> None:
    from stepscope.engine.bench.gpu.measure.steps import time_steps
    from stepscope.engine.scheduling.step import StepResult

    class Cut:
        num_blocks, block_size = 8, 16

        def clock(self) -> int:
            return 0

        def execute(self, step: object) -> StepResult:
            return StepResult([None], 0, 0, num_tokens_fit=4)

    bench = Bench(torch.device("cpu"), Sizes(), lambda message: None)
    with pytest.raises(MemoryError, match="only 4 tokens fit"):
        time_steps(bench, Cut(), [(0, 8)], 3)  # type: ignore[arg-type]


class FakeGpu:
    """The part of `torch.cuda` that timing uses; a launch takes a millisecond of its clock."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.recording: list[Callable[[], object]] | None = None

    def launch(self) -> None:
        if self.recording is not None:
            self.recording.append(self.launch)
        else:
            self.now_ms += 1.0

    def event(self, *, enable_timing: bool) -> Any:
        gpu = self

        class Event:
            at_ms = -1.0

            def record(self) -> None:
                self.at_ms = gpu.now_ms

            def synchronize(self) -> None:
                assert self.at_ms >= 0

            def elapsed_time(self, end: "Event") -> float:
                return end.at_ms - self.at_ms

        assert enable_timing
        return Event()

    def new_graph(self) -> Any:
        class Graph:
            launches: list[Callable[[], object]] = []  # noqa: RUF012 - filled by `recorded`

            def replay(self) -> None:
                for launch in self.launches:
                    launch()

        return Graph()

    @contextlib.contextmanager
    def recorded(self, graph: Any) -> Iterator[None]:
        self.recording = graph.launches = []
        yield
        self.recording = None


@pytest.mark.parametrize("can_capture", [True, False])
def test_gpu_times_come_from_cuda_events_and_a_recorded_graph_is_only_replayed(
    can_capture: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", gpu.new_graph)
    monkeypatch.setattr(torch.cuda, "graph", gpu.recorded)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls = 0

    def work() -> None:
        nonlocal calls
        calls += 1
        gpu.launch()

    stopwatch = Stopwatch(torch.device("cuda"), 7)
    assert stopwatch.milliseconds([work] * 4, can_capture=can_capture) == [1.0] * 7
    # Each once to warm up, the first one again, then recorded; else in every round, one unmeasured.
    assert calls == (4 + 1 + 4 if can_capture else 4 + 1 + 4 * 8)
    slow = stopwatch.milliseconds([lambda: [gpu.launch() for _ in range(300)]], can_capture=False)
    assert slow == [300.0] * 5, "slow work is measured less often"


# ---- models of random weights ----


def test_random_weights_are_equal_every_time_and_in_every_dtype() -> None:
    def draw(name: str, dtype: torch.dtype) -> torch.Tensor:
        weights = RandomWeights(torch.device("cpu"))
        weights.check({name: (8, 16)})
        return weights.read(name, dtype)

    name = "model.layers.0.mlp.up_proj.weight"
    first = draw(name, torch.float32)
    assert torch.equal(first, draw(name, torch.float32))
    assert torch.equal(first, draw(name, torch.bfloat16).float())
    assert not torch.equal(first, draw(name.replace("up", "gate"), torch.float32))
    assert float(first.std()) == pytest.approx(16**-0.5, rel=0.3)


def test_a_random_model_is_served_like_any_other_and_named_as_random(
    runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(runtime_folder))
    config = EngineConfig(
        model="random:llama-tiny", device="cpu", max_model_len=64, kv_memory="4MB"
    )
    with open_engine(config, Knobs(), progress=lambda what, share: None) as (core, _, vocab_size):
        assert core.info.model == "random:llama-tiny"
        assert core.info.architecture == "LlamaForCausalLM"
        assert vocab_size == SHAPES["llama-tiny"]["vocab_size"]
    with pytest.raises(
        ConfigError, match=r"no random model is called 'gpt'; there are: qwen3-0\.6b"
    ):
        random_model.ensure("random:gpt")
    folder = random_model.ensure("random:llama-tiny")
    with pytest.raises(ConfigError, match="no weights for transformers to read"):
        loader.load_model(
            folder,
            "random:llama-tiny",
            loader.load_config(folder, "x"),
            "transformers",
            64,
            torch.float32,
            torch.device("cpu"),
            lambda what, share: None,
        )


def test_a_measured_point_has_its_median_and_spread() -> None:
    point = BenchPoint(
        what="x", samples=[1.0, 2.0, 3.0, 4.0, 50.0], facts={"a": 2, "b": True, "c": [1]}
    )
    assert point.median == 3
    assert (point.number("a"), point.number("b"), point.number("c")) == (2, None, None)
    assert (point.numbers("c"), point.numbers("a")) == ([1], [])
