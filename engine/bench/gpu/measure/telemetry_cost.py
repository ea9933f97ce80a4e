"""(i) The cost of telemetry: the same decodes run in pairs, once with telemetry and once without.

All runs use one engine, one after the other. The order within a pair alternates. A subscriber on
this machine receives all telemetry.
"""

import random

from stepscope.engine.bench.gpu.measure.bench import Bench, NotMeasuredError
from stepscope.engine.bench.gpu.measure.steps import EngineSide
from stepscope.engine.bench.gpu.measure.streams import Streams
from stepscope.engine.client.telemetry_reader import TelemetryReader
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.settings.sampling_params import SamplingParams

NUM_PROMPT_TOKENS = 16


def measure(bench: Bench, engine: EngineSide) -> None:
    sizes, core = bench.sizes, engine.core
    bench.setting(
        **engine.settings(),
        num_requests=sizes.telemetry_requests,
        output_tokens=sizes.telemetry_output,
    )
    with_s: list[float] = []
    without_s: list[float] = []
    sink = core.sink
    reader = TelemetryReader(core.info.telemetry_endpoint)
    try:
        _run(bench, engine, 0)  # warms up
        for number in range(sizes.telemetry_pairs):
            bench.check_time()
            bench.doing(f"pair {number + 1} of {sizes.telemetry_pairs}")
            for is_on in (True, False) if number % 2 else (False, True):
                core.publish_to(sink if is_on else None)
                (with_s if is_on else without_s).append(_run(bench, engine, 1 + number))
                reader.drain()
    finally:
        core.publish_to(sink)
        reader.close()
        if without_s and len(with_s) == len(without_s):
            bench.found(
                "with telemetry / without",
                [1e3 * each for each in with_s],
                without_ms=[1e3 * each for each in without_s],
                ratios=[on / off for on, off in zip(with_s, without_s, strict=True)],
                num_received=reader.num_received,
                num_gaps=reader.num_gaps,
            )


def _run(bench: Bench, engine: EngineSide, seed: int) -> float:
    """Return the seconds of one run. Prompts are short, so nearly all steps are decodes."""
    sizes, source = bench.sizes, random.Random(seed)
    submits = [
        Submit(
            client_id=f"telemetry-{i}",
            prompt_token_ids=[
                source.randrange(engine.vocab_size) for _ in range(NUM_PROMPT_TOKENS)
            ],
            sampling=SamplingParams(max_tokens=sizes.telemetry_output, ignore_eos=True),
            with_text=False,
        )
        for i in range(sizes.telemetry_requests)
    ]
    run = Streams(engine.core, engine.intake, submits, most_s=max(1.0, bench.left_s))
    run.run()
    if run.is_partial:
        raise NotMeasuredError("its time was up")
    return run.seconds
