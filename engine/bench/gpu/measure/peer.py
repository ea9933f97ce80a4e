"""(g) The yardstick's requests through transformers' `generate_batch` (its continuous batching).

The library warms up its manager itself (CUDA graphs included), and a few short requests warm it up
further. All requests then run with short outputs. The time they take tells how long outputs can be
in the remaining time, and the requests run again with outputs of this length. If outputs had to be
cut, stepscope runs the same requests with the same cut (`PeerWork`).
Settings are the library's defaults, with three exceptions. The KV cache has room for exactly these
requests, because without flash-attn the attention mask spans the whole cache. The token budget is
stepscope's. Blocks are not shared, because no two prompts are alike.
"""

import contextlib
import math
import time
from dataclasses import fields
from typing import Any

import torch

from stepscope.engine.bench.gpu.measure import transformers_side, yardstick
from stepscope.engine.bench.gpu.measure.bench import Bench
from stepscope.engine.bench.gpu.parts import PeerWork
from stepscope.engine.models.random_shapes import SHAPES

PAGE_SIZE = 256  # the library's own
NUM_WARM_UPS = 4
GROWTH = 1.2  # a step's time grows by this factor as contexts grow
STOP_S = 15.0


def measure(bench: Bench, name: str) -> None:
    import transformers

    bench.doing("loading the model into transformers")
    dtype = torch.bfloat16 if bench.is_gpu else torch.float32
    model = transformers_side.load(name, bench.device, dtype)
    bench.setting(
        software=f"transformers {transformers.__version__}",
        peer_dtype=str(dtype).removeprefix("torch."),
        peer_page_size=PAGE_SIZE,
    )
    counts = bench.sizes.peer_requests
    for place, num_requests in enumerate(counts):
        whole = PeerWork(num_requests=num_requests, most_output=bench.sizes.yardstick_lengths[1])
        what = f"generate_batch, {num_requests} requests"
        facts = {"contender": "generate_batch", "work": whole.in_words}
        with bench.attempt(what, **facts):
            # Larger works get more of the time.
            share = num_requests**0.5 / sum(each**0.5 for each in counts[place:])
            _measure(bench, model, name, whole, bench.left_s * share)


def _measure(bench: Bench, model: Any, name: str, whole: PeerWork, seconds: float) -> None:
    """Measure the requests of `whole`, in `seconds` in total."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    start_s = time.monotonic()
    vocab_size = SHAPES[name]["vocab_size"]
    submits = yardstick.requests(bench.sizes, whole, vocab_size)
    blocks = sum(
        math.ceil((len(each.prompt_token_ids or ()) + each.sampling.max_tokens) / PAGE_SIZE) + 1
        for each in submits
    )
    wanted = {
        "page_size": PAGE_SIZE,
        "block_size": PAGE_SIZE,  # its name until transformers 5.17
        "num_blocks": blocks + 1,
        "max_batch_tokens": bench.sizes.budget,
        "allow_block_sharing": False,
    }
    known = {each.name for each in fields(ContinuousBatchingConfig)}
    if "page_size" in known:
        del wanted["block_size"]
    settings = ContinuousBatchingConfig(**{k: v for k, v in wanted.items() if k in known})
    generation = GenerationConfig(
        max_new_tokens=whole.most_output, eos_token_id=-1, pad_token_id=0, do_sample=False
    )
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=settings
    ) as manager:
        until_s = start_s + seconds
        first = min(whole.most_output, bench.sizes.peer_first_output)
        _run(bench, manager, submits[:NUM_WARM_UPS], first, until_s)
        most_output = first
        taken_s, num_tokens = _run(bench, manager, submits, first, until_s)
        # Time grows at most in proportion to the output length, except for the longer contexts.
        left_s = until_s - time.monotonic()
        longer = min(whole.most_output, int(first * left_s / (taken_s * GROWTH)))
        if longer > 2 * first:
            with contextlib.suppress(TimeoutError):  # the result with short outputs then counts
                taken_s, num_tokens = _run(bench, manager, submits, longer, until_s + STOP_S)
                most_output = longer
        work = PeerWork(num_requests=whole.num_requests, most_output=most_output)
        bench.found(
            f"generate_batch, {work.in_words}",
            [taken_s * 1e3],
            contender="generate_batch",
            work=work.in_words,
            num_requests=work.num_requests,
            most_output=work.most_output,
            is_cut=most_output < whole.most_output,
            num_output_tokens=num_tokens,
            output_tokens_per_s=num_tokens / taken_s,
            **_in_use(manager, model),
        )


def _run(
    bench: Bench, manager: Any, submits: list[Any], most_output: int, until_s: float
) -> tuple[float, int]:
    """Run all requests with outputs cut to `most_output`. Returns seconds and output tokens.

    Raises:
        TimeoutError: `until_s` has passed.
        RuntimeError: a request failed.
    """
    start_s = time.perf_counter()
    for submit in submits:
        manager.add_request(
            list(submit.prompt_token_ids),
            max_new_tokens=min(submit.sampling.max_tokens, most_output),
        )
    num_finished = num_tokens = 0
    while num_finished < len(submits):
        result = manager.get_result(timeout=1.0)
        if result is not None:
            if result.error is not None:
                raise RuntimeError(f"generate_batch failed: {result.error}")
            num_finished += 1
            num_tokens += len(result.generated_tokens)
            bench.doing(f"generate_batch, {num_finished} of {len(submits)} finished")
        elif not manager.is_running():
            raise RuntimeError("the manager of generate_batch has stopped")
        if time.monotonic() > until_s and num_finished < len(submits):
            # Stop it here, because leaving its context would wait for all requests.
            manager.stop(block=True, timeout=STOP_S, hard_stop=True)
            raise TimeoutError(
                f"its time was up with {num_finished} of {len(submits)} requests finished, "
                f"outputs up to {most_output}"
            )
    return time.perf_counter() - start_s, num_tokens


def _in_use(manager: Any, model: Any) -> dict[str, str]:
    """Return the settings that the library chose by itself."""
    settings = getattr(manager, "continuous_batching_config", None)
    return {
        "attention": str(model.config._attn_implementation),
        **{
            name: str(getattr(settings, name, "unknown"))
            for name in ("use_cuda_graph", "use_async_batching", "max_batch_tokens", "num_blocks")
        },
    }
