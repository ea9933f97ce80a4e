"""(f) The yardstick: 256 requests, prompts and outputs of 100 to 1024 tokens, submitted at once.

Also stepscope's half of (g): the same requests as transformers ran.
"""

from stepscope.engine.bench.gpu.measure.bench import Bench, NotMeasuredError
from stepscope.engine.bench.gpu.measure.steps import EngineSide
from stepscope.engine.bench.gpu.measure.streams import Streams
from stepscope.engine.bench.gpu.parts import PeerWork, Sizes
from stepscope.engine.bench.measured_run import ThroughputProgress, measure
from stepscope.engine.bench.throughput import LengthRange, ThroughputSpec, plan
from stepscope.engine.protocol.commands import Submit

WARM_UP = ThroughputSpec(
    num_requests=2, input_len=LengthRange(8, 32), output_len=LengthRange(4, 8), seed=1
)


def spec(sizes: Sizes) -> ThroughputSpec:
    lengths = LengthRange(*sizes.yardstick_lengths)
    return ThroughputSpec(
        num_requests=sizes.yardstick_requests, input_len=lengths, output_len=lengths
    )


def requests(sizes: Sizes, work: PeerWork, vocab_size: int) -> list[Submit]:
    """Return the first requests of the yardstick, with outputs cut.

    `work` says how many requests, and how long outputs may be.
    """
    return [
        Submit(
            client_id=submit.client_id,
            prompt_token_ids=submit.prompt_token_ids,
            sampling=type(submit.sampling)(
                max_tokens=min(submit.sampling.max_tokens, work.most_output), ignore_eos=True
            ),
            with_text=False,
        )
        for submit in plan(spec(sizes), work.num_requests, vocab_size)
    ]


def measure_yardstick(bench: Bench, engine: EngineSide) -> None:
    """(f) Run the yardstick with the default knobs.

    The only sample is the time of the whole run.
    """
    core, knobs = engine.core, engine.core.scheduler.knobs
    bench.setting(**engine.settings(), max_num_batched_tokens=knobs.max_num_batched_tokens)
    work = spec(bench.sizes)
    num_requests = bench.sizes.yardstick_requests

    def progress(so_far: ThroughputProgress) -> None:
        bench.doing(f"{so_far.num_finished} of {so_far.num_requests} finished")
        if bench.left_s <= 0:
            core.stop()

    warm_up = plan(WARM_UP, WARM_UP.num_requests or 0, engine.vocab_size)
    measured = plan(work, num_requests, engine.vocab_size)
    result = measure(core, engine.intake, measured, warm_up, progress=progress).result
    if result.num_failed:
        raise NotMeasuredError(
            f"{result.num_failed} requests failed: {next(iter(result.failures))}"
        )
    steps = result.steps
    bench.found(
        f"{num_requests} requests",
        [result.seconds * 1e3],
        num_output_tokens=result.num_output_tokens,
        num_prompt_tokens=result.num_prompt_tokens,
        output_tokens_per_s=result.output_tokens_per_s,
        is_partial=result.is_partial,
        num_preemptions=result.num_preemptions,
        decode_step_p50_ms=None
        if steps is None or steps.decode_step_ms is None
        else steps.decode_step_ms.p50,
        model_share=None if steps is None else steps.shares.model,
    )
    if result.is_partial:
        raise NotMeasuredError(
            "time ran out before all requests ended; the figures cover only part of the work"
        )


def measure_same_work(bench: Bench, engine: EngineSide, works: list[PeerWork]) -> None:
    """(g) Run on stepscope the requests that transformers ran. See `PeerWork`."""
    if not works:
        raise NotMeasuredError("generate_batch did none of the work: see its line")
    bench.setting(**engine.settings())
    for work in works:
        what = f"stepscope, {work.in_words}"
        with bench.attempt(what, contender="stepscope", work=work.in_words):
            submits = requests(bench.sizes, work, engine.vocab_size)
            run = Streams(engine.core, engine.intake, submits, most_s=bench.left_s)
            run.run()
            if run.is_partial:
                raise NotMeasuredError("its time was up before all requests had ended")
            bench.found(
                what,
                [run.seconds * 1e3],
                contender="stepscope",
                work=work.in_words,
                num_output_tokens=run.num_output_tokens,
                output_tokens_per_s=run.num_output_tokens / run.seconds,
            )
