"""A torch profiler's trace beside the recording of its vLLM: whose step a kernel was of."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.engine.protocol.wire import Phase, StepRecord
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.messages import messages
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.importing.torch_trace import (
    ProfiledStep,
    kind_of,
    matched_steps,
    read_trace,
)

SAMPLES = Path(__file__).parent / "samples"
SERVED = SAMPLES / "vllm_served.mcap"
MI300X = SAMPLES / "torch_profiler_vllm_decode_full.json.gz"


def event(category: str, name: str, us: float, dur: float, **args: Any) -> dict[str, Any]:
    when = {"ts": us, "dur": dur, "pid": 1, "tid": 1}
    return {"ph": "X", "cat": category, "name": name, **when, "args": args}


def launch(number: int, us: float) -> dict[str, Any]:
    return event("cuda_runtime", "cudaLaunchKernel", us, 1, correlation=number)


def kernel(name: str, number: int, us: float, dur: float) -> dict[str, Any]:
    return event("kernel", name, us, dur, correlation=number)


def step(batch: str, us: float, dur: float = 10) -> dict[str, Any]:
    return event("user_annotation", batch, us, dur)


def written(path: Path, events: list[dict[str, Any]], **head: Any) -> Path:
    path.write_text(json.dumps({"traceEvents": events, **head}))
    return path


def spent(step: Any) -> dict[str, int]:
    return {kind: ns for kind, ns in step.kernel_ns.items() if ns}


def test_a_kernel_is_of_the_step_that_launched_it_whenever_it_ran(tmp_path: Path) -> None:
    events = [
        step("execute_context_1(64)_generation_2(2)", 100),
        launch(1, 105), launch(2, 115),  # the second after the model: sampling
        step("execute_50_context_0(sq0sk0sqsq0sqsk0)_generation_2(sq2sk90sqsq2sqsk90)", 120),
        launch(3, 125), launch(4, 126),
        step("execute_context_0(0)_generation_0(0)", 130),  # of no request
        launch(9, 90),  # before the first step
        kernel("nvjet_gemm", 1, 200, 50), kernel("topk_topp", 2, 250, 5),
        kernel("flash_fwd_splitkv", 3, 255, 20),
        kernel("ncclDevKernel_AllReduce", 4, 260, 30),  # beside it, on another stream
        kernel("nvjet_gemm", 9, 90, 9),
        event("python_function", "nn.Module: gemm", 100, 99),
    ]  # fmt: skip
    first, second = read_trace(written(tmp_path / "trace.json", events)).steps
    assert (first.batch, second.batch) == ((1, 64, 2, 2), (0, 0, 2, 2))
    assert spent(first) == {"linear": 50_000, "sampling": 5_000}
    assert spent(second) == {"attention": 20_000, "communication": 30_000}
    assert (first.busy_ns, second.busy_ns) == (55_000, 35_000)


def test_without_kernels_each_operators_own_time_counts(tmp_path: Path) -> None:
    events = [
        step("execute_context_0(0)_generation_1(1)", 0),
        event("cpu_op", "aten::linear", 1, 10),
        event("cpu_op", "aten::t", 1, 2),
        event("cpu_op", "aten::mm", 4, 6),
        event("cpu_op", "aten::argmax", 12, 3),
    ]
    trace = read_trace(written(tmp_path / "trace.json", events))
    (only,) = trace.steps
    assert trace.device == ""
    assert spent(only) == {"linear": 8_000, "other": 2_000, "sampling": 3_000}
    assert only.busy_ns == 13_000


def test_a_trace_of_an_amd_gpu_loses_no_kernel() -> None:
    trace = read_trace(MI300X)
    events = json.loads(gzip.decompress(MI300X.read_bytes()))["traceEvents"]
    total = sum(each["dur"] for each in events if each.get("cat") in ("kernel", "gpu_memcpy"))
    (only,) = trace.steps
    assert only.batch == (0, 0, 32, 32)
    assert sum(only.kernel_ns.values()) == pytest.approx(total * 1000, abs=1000)
    assert {kind_of(name) for _, name in trace.kernels} >= {"attention", "linear", "sampling"}


def recorded() -> tuple[Any, list[StepRecord]]:
    """The engine of `SERVED`, and its steps."""
    with Recording(SERVED) as recording:
        found = [each.message for each in messages(recording)]
        return recording.info, [each for each in found if isinstance(each, StepRecord)]


@pytest.fixture
def profiled(tmp_path: Path) -> Callable[..., Path]:
    """Writes the trace that a profiler would have made of steps of `SERVED`."""

    def write(first: int, number: int, by: int = 1) -> Path:
        events, batch = [], "execute_context_{}({})_generation_{}({})"
        info, steps = recorded()
        for record in steps[first : first + number * by : by]:
            rows = record.batch or ()
            decodes = [each.num_tokens for each in rows if each.phase == Phase.DECODE]
            sizes = len(rows) - len(decodes), record.num_prefill_tokens, len(decodes), sum(decodes)
            us = info.wall_at(record.schedule_start_ns) / 1000
            events += [step(batch.format(*sizes), us), launch(record.step, us)]
            events.append(kernel("gemm", record.step, us, 1.5))
        return written(tmp_path / "trace.json", events, baseTimeNanoseconds=0)

    return write


def matched(trace: Path) -> list[ProfiledStep]:
    with Recording(SERVED) as recording:
        return matched_steps(read_trace(trace), recording)[0]


def test_steps_of_a_trace_are_found_by_their_batches(profiled: Any) -> None:
    _, steps = recorded()
    for first in (0, 20, len(steps) - 30):
        found = matched(profiled(first, 30))
        expected = [(r.step, r.tokens_ns - r.schedule_start_ns) for r in steps[first : first + 30]]
        assert [(each.step, each.ns) for each in found] == expected
        assert all(each.ns - each.host_ns == 1_500 for each in found)


def test_a_trace_of_another_run_is_refused(profiled: Any) -> None:
    with pytest.raises(RecordingError, match="are both of one run"):
        matched(profiled(0, 60, 2))  # every other step
    with pytest.raises(RecordingError, match="no step of the trace has the batch"):
        matched(MI300X)


def test_explain_prints_what_ran_in_the_steps(profiled: Any, stepscope: Any) -> None:
    trace = str(profiled(5, 40))
    said = stepscope("explain", str(SERVED), "--profile", trace, "--limit", "3").stdout
    assert "40 of 40 steps found by their batches" in said
    assert said.count("prefill, ") == 3
    document = json.loads(stepscope("explain", str(SERVED), "--profile", trace, "--json").stdout)
    assert [each["linear_ms"] for each in document["steps"]] == [0.0015] * 40
    for options, error in (
        (("freeze", "--profile", "nosuch"), "nosuch: No such file"),
        (("freeze", "--profile", str(SAMPLES / "README.md")), "expected a torch profiler's trace"),
        (("freeze", "--profile", trace, "--queue"), "--profile: of a recording; leave out"),
    ):
        done = stepscope("explain", *options)
        assert done.exit_code != 0
        assert error in done.stderr
