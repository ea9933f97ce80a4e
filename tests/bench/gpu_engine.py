"""The parts of `bench_gpu.py` that an open engine measures: (b) to (i) but the kernels.

(b), (c), (d) time trial steps through the runner. They overwrite KV blocks without allocating them,
so they come before the engine's first request. The floor of a decode is the bytes it must read: all
weights once (not the embeddings, of which single rows are read) and the keys and values of all
contexts. The floor of a prefill is the operations it must compute, a multiplication and an addition
as two: the weights of the layers for every token, causal attention for every pair of a query and a
visible key, the head for the tokens with logits; what follows the attention of the last layer is
computed for those tokens only, too.

(h) 64 requests decode. Each time they have produced some more tokens, a prompt of 16K tokens
arrives: so many that more than 1 % of the gaps would contain a whole prefill, so the 99th
percentile shows whether prefills delay decodes. Modes that split prompts have a budget of 2,048
tokens, that of the others fits a whole prompt.
"""

import contextlib
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

from gpu_bench import Bench, NotMeasuredError  # type: ignore[import-not-found]
from gpu_report import percentile  # type: ignore[import-not-found]
from telemetry_reader import TelemetryReader  # type: ignore[import-not-found]

from stepscope.engine.bench import measured_run
from stepscope.engine.bench.throughput import LengthRange, ThroughputSpec, plan
from stepscope.engine.control.intake import Intake
from stepscope.engine.execution.runner import ModelRunner
from stepscope.engine.execution.step_costs import trial_step
from stepscope.engine.loop.core import EngineCore
from stepscope.engine.loop.inbox import Call, SilentClient
from stepscope.engine.models.random_model import PREFIX
from stepscope.engine.process.serve import open_engine
from stepscope.engine.protocol.commands import ResetPrefixCache, SetKnobs, Submit
from stepscope.engine.protocol.replies import AnyReply, Error, Output, Submitted
from stepscope.engine.protocol.settings.engine_config import EngineConfig
from stepscope.engine.protocol.settings.knobs import Batching, Knobs
from stepscope.engine.protocol.settings.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import KnobValue
from stepscope.engine.scheduling.request import Request
from stepscope.engine.simulation.model_shape import ModelShape, model_shape

Lengths = Sequence[tuple[int, int]]  # of each request: tokens before the step, tokens in the step
# Long steps need fewer samples: stop after this many seconds with this many samples.
ENOUGH_S, ENOUGH_SAMPLES = 2.0, 5
# The two modes with an aim come first, because time may run out.
_AIMED: tuple[Batching, ...] = ("continuous", "chunked")
MODES = (*_AIMED, *(mode for mode in get_args(Batching) if mode not in _AIMED))
RECORDER_START_S, RECORDER_STOP_S = 20.0, 20.0
WHO = "bench"


def decode_bytes(shape: ModelShape, batch: int, context: int) -> int:
    """The least bytes that a decode of `batch` requests of `context` tokens each reads, in bf16."""
    return int(shape.weight_bytes + batch * context * shape.kv_bytes_per_token)


def step_flops(shape: ModelShape, lengths: Lengths, num_logits: int) -> int:
    """The operations of a step that needs the logits of so many tokens."""
    layers = shape.attention_weights + shape.mlp_weights
    # Of these, those in the last layer after its attention.
    tail = (
        shape.num_heads * shape.head_dim * shape.hidden_size + shape.mlp_weights // shape.num_layers
    )
    pairs = sum(causal_pairs(before, count) for before, count in lengths)
    return (
        2 * (layers - tail) * sum(count for _, count in lengths)
        + attention_flops(pairs, shape.num_heads, shape.head_dim) * shape.num_layers
        + 2 * (tail + shape.head_weights) * num_logits
    )


def causal_pairs(before: int, count: int) -> int:
    """Pairs of one of `count` new queries and a key that it sees."""
    return count * before + count * (count + 1) // 2


def attention_flops(num_pairs: int, num_heads: int, head_dim: int) -> int:
    """The operations of one layer's two matrix products of attention (scores and values)."""
    return 4 * num_pairs * num_heads * head_dim


class EngineSide(NamedTuple):
    """An open engine with a random model."""

    core: EngineCore
    intake: Intake
    vocab_size: int
    shape: ModelShape

    @property
    def runner(self) -> ModelRunner:
        return cast(ModelRunner, self.core.runner)


@contextlib.contextmanager
def engine_side(bench: Bench, model: str) -> Iterator[EngineSide]:
    """Open an engine as in `stepscope serve`, with room for the longest step of all parts."""
    sizes = bench.sizes
    config = EngineConfig(
        model=PREFIX + model,
        device=str(bench.device),
        max_model_len=sizes.max_model_len,
        token_capacity=sizes.max_model_len,
        seq_capacity=sizes.seq_capacity,
        kv_memory=sizes.kv_memory,
    )
    knobs = Knobs(max_num_batched_tokens=sizes.budget, max_num_seqs=sizes.seq_capacity)
    with open_engine(config, knobs, progress=lambda what, share: None) as (core, intake, size):
        engine, info = EngineSide(core, intake, size, model_shape(PREFIX + model)), core.info
        bench.common_settings = {
            "dtype": info.dtype,
            "implementation": info.implementation or "",
            "attention": info.attention_backend or "",
            "overlap": core.overlap,
            "kv_tokens": engine.runner.num_blocks * engine.runner.block_size,
        }
        yield engine


# (b), (c), (d): steps


def measure_decode(bench: Bench, engine: EngineSide) -> None:
    runner = engine.runner
    for context in bench.sizes.contexts:
        for batch in bench.sizes.batches:
            _measure_step(
                bench,
                engine,
                f"batch {batch}, context {context}",
                [(context - 1, 1)] * batch,
                batch=batch,
                context=context,
                floor_bytes=decode_bytes(engine.shape, batch, context),
                # With too few blocks, requests share some. They still read as many bytes.
                has_shared_blocks=batch * -(-context // runner.block_size) > runner.num_blocks,
            )


def measure_prefill(bench: Bench, engine: EngineSide) -> None:
    for count in bench.sizes.prefills:
        flops = step_flops(engine.shape, [(0, count)], 1)
        _measure_step(
            bench, engine, f"{count} tokens", [(0, count)], tokens=count, floor_flops=flops
        )


def measure_curve(bench: Bench, engine: EngineSide) -> None:
    for count in bench.sizes.curve:
        _measure_step(bench, engine, f"{count} tokens", [(0, count)], tokens=count)


def _measure_step(
    bench: Bench, engine: EngineSide, what: str, lengths: Lengths, **facts: int | bool
) -> None:
    with bench.attempt(what, **facts):
        samples, times = time_steps(bench, engine.runner, lengths)
        bench.found(what, samples, **times, **facts)


def time_steps(
    bench: Bench, runner: ModelRunner, lengths: Lengths
) -> tuple[list[float], dict[str, Any]]:
    """Time one step, repeatedly, in milliseconds.

    Returns:
        From one step's tokens to the next step's, with two steps in flight; and as facts the times
        with no other step in flight (`alone_ms`), and of the device by CUDA events, sampling
        included (`device_ms`).

    Raises:
        DeviceMemoryError: the whole step does not fit in memory.
    """
    step = trial_step(lengths, runner.num_blocks, runner.block_size)
    step_ms, alone_ms, device_ms = [], [], []
    for _ in range(5):
        start_ns = runner.clock()
        runner.execute(step)
        alone_ms.append((runner.clock() - start_ns) / 1e6)
    running = runner.launch(step)
    before_ns = None
    for _ in range(bench.sizes.num_samples + 1):
        following = runner.launch(step)
        result = running.collect()
        running = following
        now_ns = runner.clock()
        if before_ns is not None:
            step_ms.append((now_ns - before_ns) / 1e6)
            if result.device_ns is not None:
                device_ms.append(result.device_ns / 1e6)
        before_ns = now_ns
        is_enough = len(step_ms) >= ENOUGH_SAMPLES and sum(step_ms) > ENOUGH_S * 1e3
        if is_enough or (step_ms and bench.left_s <= 0):
            break
    running.collect()
    return step_ms, {
        "device_ms": device_ms,
        "alone_ms": alone_ms[2:],  # two warm up
        "num_padded_tokens": result.num_padded_tokens,
    }


# Requests through the engine's loop


class Stream:
    """The client of one request. Keeps the tokens it receives and their times."""

    def __init__(self, run: "Streams", *, is_first: bool) -> None:
        self._run = run
        self._is_first = is_first  # submitted at the start
        self._request: Request | None = None
        self.sent_ns = 0
        self.token_ids: list[int] = []
        self.times_ns: list[int] = []  # the time of each token

    def reply(self, message: AnyReply) -> None:
        if isinstance(message, Submitted):
            self._request = self._run.core.scheduler.requests[message.request_id]
        elif isinstance(message, Output):
            if message.token_ids and self._request is not None:
                now_ns = self._request.last_token_ns or 0
                self.token_ids += message.token_ids
                self.times_ns += [now_ns] * len(message.token_ids)
                self._run.on_tokens(len(message.token_ids) * self._is_first, now_ns)
            if message.finish_reason is not None:
                self._run.on_end()
        elif isinstance(message, Error):
            self._run.fail(message.message)


class Streams:
    """One run of some requests. Times are on the engine's clock, in nanoseconds.

    Args:
        first: requests submitted at the start, right after the prefix cache was emptied.
        arrivals: later requests, each with how many tokens the first ones have produced by then.
        most_s: seconds after which the run ends, even if requests are still running.
        before: called on a thread of its own before the first requests are submitted.
    """

    def __init__(
        self,
        engine: EngineSide,
        first: Sequence[Submit],
        arrivals: Sequence[tuple[int, Submit]] = (),
        *,
        most_s: float,
        before: Callable[[], None] | None = None,
    ) -> None:
        self.core = engine.core
        self.is_partial = False
        self.start_ns = self.end_ns = 0
        self._most_ns = int(most_s * 1e9)
        self._before = before
        prepare = engine.intake.prepare
        self._calls = [(submit, prepare(submit)) for submit in first]
        self._waiting = [(after, submit, prepare(submit)) for after, submit in arrivals]
        self.streams = [Stream(self, is_first=True) for _ in first]
        self.late: list[Stream] = []
        self._num_open = len(first) + len(arrivals)
        self._num_tokens = 0  # of the first requests
        self._failure: str | None = None

    def run(self) -> None:
        """Run all requests.

        Raises:
            NotMeasuredError: the engine refused a request, or `before` failed.
        """
        thread = threading.Thread(target=self._begin, daemon=True)
        if self._before is None:
            self._submit()
        else:
            thread.start()
        self.core.run()
        if self._before is not None:
            thread.join()
        if self._failure is not None:
            raise NotMeasuredError(self._failure)

    def _begin(self) -> None:
        assert self._before is not None
        try:
            self._before()
        except NotMeasuredError as error:
            self.fail(str(error))
        else:
            self._submit()

    def _submit(self) -> None:
        self.core.inbox.put(Call(ResetPrefixCache(who=WHO), SilentClient()))
        self.start_ns = self.end_ns = self.core.runner.clock()
        for (submit, token_ids), stream in zip(self._calls, self.streams, strict=True):
            stream.sent_ns = self.start_ns
            self.core.inbox.put(Call(submit, stream, token_ids))

    def on_tokens(self, num_of_first: int, now_ns: int) -> None:
        self.end_ns = now_ns
        self._num_tokens += num_of_first
        while self._waiting and self._num_tokens >= self._waiting[0][0]:
            _, submit, token_ids = self._waiting.pop(0)
            self.late.append(Stream(self, is_first=False))
            self.late[-1].sent_ns = now_ns
            self.core.inbox.put(Call(submit, self.late[-1], token_ids))
        if now_ns - self.start_ns > self._most_ns and not self.core.stopping:
            self.is_partial = True
            self.core.stop()

    def on_end(self) -> None:
        self._num_open -= 1
        if not self._num_open:
            self.core.stop()

    def fail(self, message: str) -> None:
        self._failure = message
        self.core.stop()

    @property
    def seconds(self) -> float:
        """From the submit of the first requests to the last token of any request."""
        return (self.end_ns - self.start_ns) / 1e9

    def rates(self) -> dict[str, float]:
        num_tokens = sum(len(each.times_ns) for each in (*self.streams, *self.late))
        return {"num_output_tokens": num_tokens, "output_tokens_per_s": num_tokens / self.seconds}


def whole_run(bench: Bench, engine: EngineSide, submits: Sequence[Submit]) -> Streams:
    """Run these requests.

    Raises:
        NotMeasuredError: the part's time was up before all had ended.
    """
    run = Streams(engine, submits, most_s=max(1.0, bench.left_s))
    run.run()
    if run.is_partial:
        raise NotMeasuredError("its time was up before all requests had ended")
    return run


def submit(name: str, token_ids: Sequence[int], num_output: int) -> Submit:
    return Submit(
        client_id=name,
        prompt_token_ids=list(token_ids),
        sampling=SamplingParams(max_tokens=num_output, ignore_eos=True),
        with_text=False,
    )


# (f), (g): the yardstick


def yardstick(sizes: Any, num_requests: int, most_output: int, vocab_size: int) -> list[Submit]:
    """The first requests of the yardstick, with outputs cut to `most_output` tokens."""
    lengths = LengthRange(*sizes.yardstick_lengths)
    spec = ThroughputSpec(
        num_requests=sizes.yardstick_requests, input_len=lengths, output_len=lengths
    )
    return [
        submit(
            each.client_id, each.prompt_token_ids or [], min(each.sampling.max_tokens, most_output)
        )
        for each in plan(spec, num_requests, vocab_size)
    ]


def measure_yardstick(bench: Bench, engine: EngineSide) -> None:
    """(f) Run the yardstick with the default knobs. The one sample is the time of all of it."""
    core, sizes = engine.core, bench.sizes
    bench.setting(max_num_batched_tokens=core.scheduler.knobs.max_num_batched_tokens)
    bench.doing("the whole run")
    short = ThroughputSpec(input_len=LengthRange(8, 32), output_len=LengthRange(4, 8), seed=1)
    warm_up = plan(short, 2, engine.vocab_size)
    num_requests = sizes.yardstick_requests
    submits = yardstick(sizes, num_requests, sizes.yardstick_lengths[1], engine.vocab_size)

    def on_progress(_: object) -> None:
        if bench.left_s <= 0:
            core.stop()

    measured = measured_run.measure(core, engine.intake, submits, warm_up, progress=on_progress)
    result = measured.result
    if result.num_failed:
        raise NotMeasuredError(
            f"{result.num_failed} requests failed: {next(iter(result.failures))}"
        )
    steps = result.steps
    decode_ms = None if steps is None else steps.decode_step_ms
    bench.found(
        f"{num_requests} requests",
        [result.seconds * 1e3],
        num_output_tokens=result.num_output_tokens,
        num_prompt_tokens=result.num_prompt_tokens,
        output_tokens_per_s=result.output_tokens_per_s,
        is_partial=result.is_partial,
        num_preemptions=result.num_preemptions,
        decode_step_p50_ms=None if decode_ms is None else decode_ms.p50,
        model_share=None if steps is None else steps.shares.model,
    )
    if result.is_partial:
        raise NotMeasuredError("time ran out; the figures cover only part of the work")


def measure_same_work(bench: Bench, engine: EngineSide) -> None:
    """(g) Run on stepscope the requests that transformers ran, with the same cut."""
    works = [
        point.facts for point in bench.points if point.samples and "num_requests" in point.facts
    ]
    if not works:
        raise NotMeasuredError("generate_batch did none of the work: see its line")
    for facts in works:
        work = facts["work"]
        with bench.attempt(f"stepscope, {work}", contender="stepscope", work=work):
            counts = (facts["num_requests"], facts["most_output"])
            run = whole_run(bench, engine, yardstick(bench.sizes, *counts, engine.vocab_size))
            more = {"contender": "stepscope", "work": work, **run.rates()}
            bench.found(f"stepscope, {work}", [run.seconds * 1e3], **more)


# (h): long prompts among decodes


def measure_arrivals(bench: Bench, engine: EngineSide) -> None:
    """Measure every batching mode, one after the other, with the same requests."""
    sizes, core = bench.sizes, engine.core
    bench.setting(
        num_streams=sizes.num_streams,
        arrival_prompt=sizes.arrival_prompt,
        num_arrivals=sizes.num_arrivals,
    )
    before = core.scheduler.knobs
    try:
        for place, mode in enumerate(MODES):
            is_slicing = mode in ("chunked", "separate")
            budget = sizes.budget if is_slicing else core.limits.max_num_batched_tokens
            with bench.attempt(mode, budget=budget):
                _set_knobs(core, batching=mode, max_num_batched_tokens=budget)
                most_s = bench.left_s / (len(MODES) - place)
                with _recording(bench, core.info.control_endpoint, mode) as wait:
                    _measure_mode(bench, engine, mode, budget, most_s, wait)
    finally:
        _set_knobs(
            core, batching=before.batching, max_num_batched_tokens=before.max_num_batched_tokens
        )


def _set_knobs(core: EngineCore, **changes: KnobValue) -> None:
    """Set knobs between two runs: they apply before the first request of the next run."""
    core.scheduler.knobs.changed(changes, core.limits)  # raises if the engine would refuse them
    core.inbox.put(Call(SetKnobs(changes=changes, who=WHO), SilentClient()))


def _measure_mode(
    bench: Bench,
    engine: EngineSide,
    mode: str,
    budget: int,
    most_s: float,
    wait: Callable[[], None] | None,
) -> None:
    sizes, source = bench.sizes, random.Random(0)

    def request(name: str, num_prompt: int, num_output: int) -> Submit:
        token_ids = [source.randrange(engine.vocab_size) for _ in range(num_prompt)]
        return submit(name, token_ids, num_output)

    num, spacing = sizes.num_streams, sizes.arrival_spacing
    streams = [request(f"stream-{i}", sizes.stream_prompt, sizes.stream_output) for i in range(num)]
    arrivals = [
        ((i * spacing + spacing // 2) * num, request(f"document-{i}", sizes.arrival_prompt, 4))
        for i in range(sizes.num_arrivals)
    ]
    run = Streams(engine, streams, arrivals, most_s=most_s, before=wait)
    run.run()
    if not run.late:
        raise NotMeasuredError("its time was up before the first long prompt came")
    # Rounded to microseconds, to keep the report small: there are thousands.
    gaps = [
        round((later - earlier) / 1e6, 3)
        for stream in run.streams
        for earlier, later in zip(stream.times_ns, stream.times_ns[1:], strict=False)
        if later > run.late[0].sent_ns
    ]
    if not gaps:
        raise NotMeasuredError("no stream had a token after the first long prompt")
    bench.found(
        mode,
        gaps,
        budget=budget,
        p50_ms=percentile(gaps, 0.5),
        p99_ms=percentile(gaps, 0.99),
        max_ms=max(gaps),
        # Of the long prompts.
        ttft_ms=[(each.times_ns[0] - each.sent_ns) / 1e6 for each in run.late if each.times_ns],
        seconds=run.seconds,
        output_tokens_per_s=run.rates()["output_tokens_per_s"],
        is_partial=run.is_partial,
    )


@contextlib.contextmanager
def _recording(bench: Bench, endpoint: str, mode: str) -> Iterator[Callable[[], None] | None]:
    """Yield a function that starts the recorder and waits until it writes; None for no recording.

    The recorder is stopped when the `with` block ends.
    """
    file = bench.recordings.get(mode, "")
    started: list[subprocess.Popen[bytes]] = []

    def wait() -> None:
        command = [part.format(endpoint=endpoint, file=file) for part in bench.recorder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        started.append(process)
        until_s = time.monotonic() + RECORDER_START_S
        while not list(Path(file).parent.glob(f"{Path(file).name}*")):
            if process.poll() is not None or time.monotonic() > until_s:
                raise NotMeasuredError(f"the recorder did not begin to write {file}")
            time.sleep(0.05)
        time.sleep(0.5)  # until the recorder has a snapshot from before the run

    try:
        yield wait if file else None
    finally:
        for process in started:
            time.sleep(0.5)  # the last records are on their way
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            try:
                process.wait(RECORDER_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


# (i): telemetry


def measure_telemetry(bench: Bench, engine: EngineSide) -> None:
    """Run the same decodes in pairs, once with telemetry and once without, in alternating order.

    A subscriber on this machine receives all telemetry.
    """
    sizes, core = bench.sizes, engine.core
    bench.setting(num_requests=sizes.telemetry_requests, output_tokens=sizes.telemetry_output)
    times_s: dict[bool, list[float]] = {True: [], False: []}
    sink = core.sink

    def seconds(seed: int) -> float:
        source = random.Random(seed)
        submits = [
            submit(
                f"telemetry-{i}",
                [source.randrange(engine.vocab_size) for _ in range(16)],
                sizes.telemetry_output,
            )
            for i in range(sizes.telemetry_requests)
        ]
        return whole_run(bench, engine, submits).seconds

    reader = TelemetryReader(core.info.telemetry_endpoint)
    try:
        seconds(0)  # warms up
        for number in range(sizes.telemetry_pairs):
            bench.check_time()
            bench.doing(f"pair {number + 1} of {sizes.telemetry_pairs}")
            for is_on in (True, False) if number % 2 else (False, True):
                core.publish_to(sink if is_on else None)
                times_s[is_on].append(seconds(1 + number))
                reader.drain()
    finally:
        core.publish_to(sink)
        reader.close()
        pairs = list(zip(times_s[True], times_s[False], strict=False))
        if pairs:
            bench.found(
                "with telemetry / without",
                [1e3 * with_s for with_s, _ in pairs],
                without_ms=[1e3 * without_s for _, without_s in pairs],
                ratios=[with_s / without_s for with_s, without_s in pairs],
                num_received=reader.num_received,
                num_gaps=reader.num_gaps,
            )
