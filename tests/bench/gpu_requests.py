"""The parts of `bench_gpu.py` that run requests through the engine's loop: (f) to (i).

(h) 64 requests decode. Each time they have produced some more tokens, a prompt of 16K tokens
arrives: so many that more than 1 % of the gaps would contain a whole prefill, so the 99th
percentile shows whether prefills delay decodes. Modes that split prompts have a budget of 2,048
tokens, that of the others fits a whole prompt.
"""

import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import zmq
from common import percentile
from gpu_bench import Bench, NotMeasuredError
from gpu_engine import EngineSide

from stepscope.engine.bench.throughput import LengthRange, ThroughputSpec, plan
from stepscope.engine.loop.core import EngineCore
from stepscope.engine.loop.inbox import Call, SilentClient
from stepscope.engine.protocol.commands import ResetPrefixCache, SetKnobs, Submit
from stepscope.engine.protocol.knobs import Batching
from stepscope.engine.protocol.replies import AnyReply, Error, Output, Submitted
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import KnobValue, sequence_of
from stepscope.engine.scheduling.request import Request
from stepscope.engine.transport.sockets import client_socket

# The two modes that a reader compares come first, because time may run out.
FIRST: tuple[Batching, ...] = ("continuous", "chunked")
MODES = (*FIRST, *(mode for mode in get_args(Batching) if mode not in FIRST))
RECORDER_START_S, RECORDER_STOP_S = 20.0, 20.0
WHO = "bench"


class Stream:
    """The client of one request. Keeps the tokens it receives and their times."""

    def __init__(self, run: "Streams", sent_ns: int, *, is_first: bool) -> None:
        self.sent_ns = sent_ns
        self.token_ids: list[int] = []
        self.times_ns: list[int] = []  # the time of each token
        self._run = run
        self._is_first = is_first  # submitted at the start
        self._request: Request | None = None

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
            self._run.failure = message.message
            self._run.core.stop()


class Streams:
    """One run of some requests. Times are on the engine's clock, in nanoseconds.

    Args:
        first: requests submitted at the start, right after the prefix cache was emptied.
        arrivals: later requests, each with how many tokens the first ones have produced by then.
        most_s: seconds after which the run ends, even if requests are still running.

    Attributes:
        streams: of the first requests. `late`: of the arrivals.
    """

    def __init__(
        self,
        engine: EngineSide,
        first: Sequence[Submit],
        arrivals: Sequence[tuple[int, Submit]] = (),
        *,
        most_s: float,
    ) -> None:
        self.core = engine.core
        self.is_partial = False
        self.failure: str | None = None
        prepare = engine.intake.prepare
        calls = [(submit, prepare(submit)) for submit in first]
        self._waiting = [(after, submit, prepare(submit)) for after, submit in arrivals]
        self._num_open = len(first) + len(arrivals)
        self._num_tokens = 0  # of the first requests
        self.core.inbox.put(Call(ResetPrefixCache(who=WHO), SilentClient()))
        self.start_ns = self.end_ns = self.core.runner.clock()
        self._until_ns = self.start_ns + int(most_s * 1e9)
        self.streams = [Stream(self, self.start_ns, is_first=True) for _ in first]
        self.late: list[Stream] = []
        for (submit, token_ids), stream in zip(calls, self.streams, strict=True):
            self.core.inbox.put(Call(submit, stream, token_ids))

    def run(self) -> "Streams":
        """Run all requests. Raises NotMeasuredError if the engine refused one."""
        self.core.run()
        if self.failure is not None:
            raise NotMeasuredError(self.failure)
        return self

    def on_tokens(self, num_of_first: int, now_ns: int) -> None:
        self.end_ns = now_ns
        self._num_tokens += num_of_first
        while self._waiting and self._num_tokens >= self._waiting[0][0]:
            _, submit, token_ids = self._waiting.pop(0)
            self.late.append(Stream(self, now_ns, is_first=False))
            self.core.inbox.put(Call(submit, self.late[-1], token_ids))
        if now_ns > self._until_ns and not self.core.stopping:
            self.is_partial = True
            self.core.stop()

    def on_end(self) -> None:
        self._num_open -= 1
        if not self._num_open:
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
    run = Streams(engine, submits, most_s=max(1.0, bench.left_s)).run()
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


def random_submit(
    source: random.Random, engine: EngineSide, name: str, num_prompt: int, num_output: int
) -> Submit:
    token_ids = [source.randrange(engine.vocab_size) for _ in range(num_prompt)]
    return submit(name, token_ids, num_output)


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
    sizes = bench.sizes
    bench.setting(max_num_batched_tokens=engine.core.scheduler.knobs.max_num_batched_tokens)
    bench.doing("the whole run")
    short = ThroughputSpec(input_len=LengthRange(8, 32), output_len=LengthRange(4, 8), seed=1)
    whole_run(bench, engine, plan(short, 2, engine.vocab_size))  # warms up
    counts = (sizes.yardstick_requests, sizes.yardstick_lengths[1])
    submits = yardstick(sizes, *counts, engine.vocab_size)
    run = Streams(engine, submits, most_s=max(1.0, bench.left_s)).run()
    facts = {"is_partial": run.is_partial, **run.rates()}
    bench.found(f"{sizes.yardstick_requests} requests", [run.seconds * 1e3], **facts)
    if run.is_partial:
        raise NotMeasuredError("time ran out; the figures cover only part of the work")


def measure_same_work(bench: Bench, engine: EngineSide) -> None:
    """(g) Run on stepscope the requests that transformers ran, with the same cut."""
    works = [point.facts for point in bench.points if point.samples]
    if not works:
        raise NotMeasuredError("generate_batch did none of the work: see its line")
    for facts in works:
        mine = {"contender": "stepscope", "work": facts["work"]}
        with bench.attempt(f"stepscope, {facts['work']}", **mine):
            counts = (facts["num_requests"], facts["most_output"])
            run = whole_run(bench, engine, yardstick(bench.sizes, *counts, engine.vocab_size))
            bench.found(f"stepscope, {facts['work']}", [run.seconds * 1e3], **mine, **run.rates())


# (h): long prompts among decodes


def measure_arrivals(bench: Bench, engine: EngineSide) -> None:
    """Measure every batching mode, one after the other, with the same requests."""
    sizes, core = bench.sizes, engine.core
    names = ("num_streams", "arrival_prompt", "num_arrivals")
    bench.setting(**{name: getattr(sizes, name) for name in names})
    before = core.scheduler.knobs
    try:
        for place, mode in enumerate(MODES):
            is_slicing = mode in ("chunked", "separate")
            budget = sizes.budget if is_slicing else core.scheduler.limits.max_num_batched_tokens
            with bench.attempt(mode, budget=budget):
                _set_knobs(core, batching=mode, max_num_batched_tokens=budget)
                with _recording(core, bench.recordings.get(mode)):
                    _measure_mode(bench, engine, mode, bench.left_s / (len(MODES) - place))
    finally:
        _set_knobs(
            core, batching=before.batching, max_num_batched_tokens=before.max_num_batched_tokens
        )


def _set_knobs(core: EngineCore, **changes: KnobValue) -> None:
    """Set knobs between two runs: they apply before the first request of the next run."""
    scheduler = core.scheduler
    scheduler.knobs.changed(changes, scheduler.limits)  # raises if the engine would refuse them
    core.inbox.put(Call(SetKnobs(changes=changes, who=WHO), SilentClient()))


def _measure_mode(bench: Bench, engine: EngineSide, mode: str, most_s: float) -> None:
    sizes = bench.sizes
    request = partial(random_submit, random.Random(0), engine)
    num, spacing = sizes.num_streams, sizes.arrival_spacing
    streams = [request(f"stream-{i}", sizes.stream_prompt, sizes.stream_output) for i in range(num)]
    arrivals = [
        ((i * spacing + spacing // 2) * num, request(f"document-{i}", sizes.arrival_prompt, 4))
        for i in range(sizes.num_arrivals)
    ]
    run = Streams(engine, streams, arrivals, most_s=most_s).run()
    if not run.late:
        raise NotMeasuredError("its time was up before the first long prompt came")
    # Rounded to microseconds, to keep the report small: there are thousands.
    gaps = [
        round((later - earlier) / 1e6, 3)
        for stream in run.streams
        for earlier, later in pairwise(stream.times_ns)
        if later > run.late[0].sent_ns
    ]
    if not gaps:
        raise NotMeasuredError("no stream had a token after the first long prompt")
    bench.found(
        mode,
        gaps,
        budget=engine.core.scheduler.knobs.max_num_batched_tokens,
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
def _recording(core: EngineCore, name: str | None) -> Iterator[None]:
    """Record to a file what the engine does in the `with` block; nothing without a name."""
    if name is None:
        yield
        return
    file = Path(name)
    command = ("-m", "stepscope.tui.cli", "record", core.info.control_endpoint, "-o", name)
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        until_s = time.monotonic() + RECORDER_START_S
        while not list(file.parent.glob(f"{file.name}*")):
            if process.poll() is not None or time.monotonic() > until_s:
                raise NotMeasuredError(f"the recorder did not begin to write {file}")
            _answer(core, 0.05)
        _answer(core, 0.5)  # until the recorder has a snapshot from before the run
        yield
    finally:
        time.sleep(0.5)  # the last records are on their way
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(RECORDER_STOP_S)
        process.kill()
        process.wait()


def _answer(core: EngineCore, seconds: float) -> None:
    """Let the engine, which has no requests, answer commands for so long."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        core.step()
        core.publish_heartbeat(idle=True)
        time.sleep(0.01)


# (i): telemetry


def measure_telemetry(bench: Bench, engine: EngineSide) -> None:
    """Run the same decodes in pairs, once with telemetry and once without, in alternating order.

    A subscriber on this machine receives all telemetry.
    """
    sizes, core = bench.sizes, engine.core
    bench.setting(num_requests=sizes.telemetry_requests, output_tokens=sizes.telemetry_output)
    times_s: dict[bool, list[float]] = {True: [], False: []}
    sink = core.outlet.sink

    def seconds(seed: int) -> float:
        request = partial(random_submit, random.Random(seed), engine)
        names = [f"telemetry-{i}" for i in range(sizes.telemetry_requests)]
        submits = [request(name, 16, sizes.telemetry_output) for name in names]
        return whole_run(bench, engine, submits).seconds

    reader = TelemetryReader(core.info.telemetry_endpoint)
    try:
        seconds(0)  # warms up
        for number in range(sizes.telemetry_pairs):
            bench.check_time()
            bench.doing(f"pair {number + 1} of {sizes.telemetry_pairs}")
            for is_on in (True, False) if number % 2 else (False, True):
                core.outlet.sink = sink if is_on else None
                times_s[is_on].append(seconds(1 + number))
                reader.drain()
    finally:
        core.outlet.sink = sink
        reader.close()
        if pairs := list(zip(times_s[True], times_s[False], strict=False)):
            bench.found(
                "with telemetry / without",
                [1e3 * with_s for with_s, _ in pairs],
                without_ms=[1e3 * without_s for _, without_s in pairs],
                ratios=[with_s / without_s for with_s, without_s in pairs],
                num_received=reader.num_received,
                num_gaps=reader.num_gaps,
            )


class TelemetryReader:
    """A subscriber that only counts messages, on their way while the engine is measured."""

    def __init__(self, address: str) -> None:
        self.num_received = self.num_gaps = 0
        self._next_sequence: int | None = None
        self._socket = client_socket(zmq.SUB, None)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(address)

    def drain(self) -> None:
        while self._socket.poll(0):
            sequence = sequence_of(self._socket.recv_multipart()[1])
            self.num_gaps += sequence - (self._next_sequence or sequence)
            self._next_sequence = sequence + 1
            self.num_received += 1

    def close(self) -> None:
        self._socket.close(linger=0)
