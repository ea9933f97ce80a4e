"""(h) ITL of decodes while long prompts arrive, in each batching mode.

64 requests decode. Each time they have produced some more tokens, a prompt of 16K tokens arrives.
The ITL values are the gaps between tokens of the 64 requests, from the first arrival on. So many
long prompts arrive that more than 1% of the gaps would contain a whole prefill. So the 99th
percentile shows whether prefills delay decodes.
Modes that split prompts have a budget of 2,048 tokens. The budget of the other modes fits a whole
prompt.
"""

import contextlib
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

from stepscope.engine.bench.gpu.measure.bench import Bench, NotMeasuredError
from stepscope.engine.bench.gpu.measure.steps import EngineSide
from stepscope.engine.bench.gpu.measure.streams import StreamArrival, Streams, gaps_ms, set_knobs
from stepscope.engine.bench.gpu.results import percentile
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.settings.knobs import Batching
from stepscope.engine.protocol.settings.sampling_params import SamplingParams

# The two modes with an aim come first, because time may run out.
_AIMED: tuple[Batching, ...] = ("continuous", "chunked")
MODES = (*_AIMED, *(mode for mode in get_args(Batching) if mode not in _AIMED))
SLICING = ("chunked", "separate")
LONG_OUTPUT = 4
RECORDER_START_S, RECORDER_STOP_S = 20.0, 20.0


def measure(
    bench: Bench, engine: EngineSide, recorder: Sequence[str], recordings: Mapping[str, str]
) -> None:
    """Measure every batching mode, one after the other, with the same requests.

    Args:
        recorder: a command that records an engine until SIGINT, with the placeholders '{endpoint}'
            and '{file}'.
        recordings: for each mode to record, the file to write. Other modes are not recorded.
    """
    sizes = bench.sizes
    bench.setting(
        **engine.settings(),
        num_streams=sizes.num_streams,
        arrival_prompt=sizes.arrival_prompt,
        num_arrivals=sizes.num_arrivals,
    )
    core, before = engine.core, engine.core.scheduler.knobs
    try:
        for place, mode in enumerate(MODES):
            budget = sizes.budget if mode in SLICING else core.limits.max_num_batched_tokens
            with bench.attempt(mode, budget=budget):
                set_knobs(core, batching=mode, max_num_batched_tokens=budget)
                most_s = bench.left_s / (len(MODES) - place)
                _measure(bench, engine, mode, budget, most_s, recorder, recordings.get(mode))
    finally:
        set_knobs(
            core, batching=before.batching, max_num_batched_tokens=before.max_num_batched_tokens
        )


def work(bench: Bench, vocab_size: int) -> tuple[list[Submit], list[StreamArrival]]:
    """Return the requests that decode, and the long prompts with the times at which they arrive."""
    sizes, source = bench.sizes, random.Random(0)

    def submit(name: str, num_prompt: int, num_output: int) -> Submit:
        return Submit(
            client_id=name,
            prompt_token_ids=[source.randrange(vocab_size) for _ in range(num_prompt)],
            sampling=SamplingParams(max_tokens=num_output, ignore_eos=True),
            with_text=False,
        )

    streams = [
        submit(f"stream-{i}", sizes.stream_prompt, sizes.stream_output)
        for i in range(sizes.num_streams)
    ]
    arrivals = [
        StreamArrival(
            (i * sizes.arrival_spacing + sizes.arrival_spacing // 2) * sizes.num_streams,
            submit(f"document-{i}", sizes.arrival_prompt, LONG_OUTPUT),
        )
        for i in range(sizes.num_arrivals)
    ]
    return streams, arrivals


def _measure(
    bench: Bench,
    engine: EngineSide,
    mode: str,
    budget: int,
    most_s: float,
    recorder: Sequence[str],
    file: str | None,
) -> None:
    streams, arrivals = work(bench, engine.vocab_size)
    with _recording(engine.core.info.control_endpoint, recorder, file) as wait:
        run = Streams(engine.core, engine.intake, streams, arrivals, most_s=most_s, before=wait)
        run.run()
    if not run.late:
        raise NotMeasuredError("its time was up before the first long prompt came")
    # Rounded to microseconds, to keep the report small: there are thousands.
    gaps = [round(each, 3) for each in gaps_ms(run.streams, run.late[0].sent_ns)]
    if not gaps:
        raise NotMeasuredError("no stream had a token after the first long prompt")
    waits = [(each.times_ns[0] - each.sent_ns) / 1e6 for each in run.late if each.times_ns]
    bench.found(
        mode,
        gaps,
        budget=budget,
        p50_ms=percentile(gaps, 0.5),
        p99_ms=percentile(gaps, 0.99),
        max_ms=max(gaps),
        ttft_ms=waits,  # of the long prompts
        seconds=run.seconds,
        output_tokens_per_s=run.num_output_tokens / run.seconds,
        is_partial=run.is_partial,
    )


@contextlib.contextmanager
def _recording(
    endpoint: str, recorder: Sequence[str], file: str | None
) -> Iterator[Callable[[], None] | None]:
    """Yield a function that starts the recorder and waits until it has begun to write `file`.

    Yields None if nothing is to be recorded. Do not call the function on the engine's thread. The
    recorder is stopped when the `with` block ends.
    """
    if file is None or not recorder:
        yield None
        return
    started: list[subprocess.Popen[bytes]] = []

    def wait() -> None:
        command = [part.format(endpoint=endpoint, file=file) for part in recorder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        started.append(process)
        until_s = time.monotonic() + RECORDER_START_S
        while not list(Path(file).parent.glob(f"{Path(file).name}*")):
            if process.poll() is not None or time.monotonic() > until_s:
                raise NotMeasuredError(f"the recorder did not begin to write {file}")
            time.sleep(0.05)
        time.sleep(0.5)  # until the recorder has a snapshot from before the run

    try:
        yield wait
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
