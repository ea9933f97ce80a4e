"""(g) transformers' half of the yardstick, and (j) exactness against transformers.

(g) runs `generate_batch`, the library's continuous batching. All requests first run with short
outputs. The time they take tells how long outputs can be in the time that is left, and they run
again with outputs of this length; stepscope then runs the same requests with the same cut. Settings
are the library's defaults but three. The KV cache has room for exactly these requests, because
without flash-attn the attention mask spans the whole cache. The token budget is stepscope's. Blocks
are not shared, because no two prompts are alike.

(j) In fp32, stepscope runs all requests together, with prompts in chunks. It must produce the
greedy tokens that `generate` produces for each request alone. In bf16, near-ties may give other
tokens, so the logits after each prompt are compared with those in fp32: our error may be up to 1.5
times transformers' own, because both round and neither is exact.
"""

import contextlib
import gc
import math
import random
import time
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import torch
from gpu_bench import Bench, NotMeasuredError
from gpu_engine import opened
from gpu_requests import submit, whole_run, yardstick

from stepscope.engine.execution.devices import give_back_memory
from stepscope.engine.models import checkpoint, loader
from stepscope.engine.models.loader import Model
from stepscope.engine.models.made_checkpoints import RANDOM_PREFIX, SHAPES
from stepscope.engine.models.weights import RandomWeights
from stepscope.engine.protocol.engine_config import EngineConfig
from stepscope.engine.protocol.knobs import Knobs
from stepscope.kernels.dispatch.backends import choose
from stepscope.kernels.paged_attention import LayerCache, PagedBatch, StepContext

PAGE_SIZE = 256  # the library's own
NUM_WARM_UPS = 4
GROWTH = 1.2  # a step's time grows by this factor as contexts grow
STOP_S = 15.0
CHUNK = 48  # token budget of (j): small, so that prompts are split and share steps with decodes
BLOCK_SIZE = 16
TOLERANCE = 1.5  # our error over transformers' error, at most
LEAST_ERROR = 1e-3  # smaller errors count as this, because they are noise
TOKENS, LOGITS = (
    "fp32: greedy tokens equal transformers'",
    "bf16: error of the logits / transformers' error",
)


def load(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Return transformers' model with the same weights as our decoder."""
    from transformers import AutoModelForCausalLM

    folder = checkpoint.locate(RANDOM_PREFIX + name, lambda what, share: None)
    config = loader.load_config(folder, name)
    # Build on the device: the library's initial weights are replaced there.
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    # Frequencies from a CPU, like ours and those of a checkpoint: a GPU rounds powers differently.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model = model.to(device).eval().requires_grad_(False)
    weights = RandomWeights(device)
    with torch.no_grad():
        for tensor, parameter in model.named_parameters():
            parameter.copy_(weights.draw(tensor, tuple(parameter.shape)))
    model.generation_config.update(eos_token_id=None, pad_token_id=0, do_sample=False)
    return model


# (g)


def measure_generate_batch(bench: Bench, name: str) -> None:
    import transformers

    bench.doing("loading the model into transformers")
    dtype = torch.bfloat16 if bench.is_gpu else torch.float32
    model = load(name, bench.device, dtype)
    bench.setting(
        software=f"transformers {transformers.__version__}",
        peer_dtype=str(dtype).removeprefix("torch."),
        peer_page_size=PAGE_SIZE,
    )
    counts, most_output = bench.sizes.peer_requests, bench.sizes.yardstick_lengths[1]
    for place, num_requests in enumerate(counts):
        facts = {"contender": "generate_batch", "work": _work(num_requests, most_output)}
        with bench.attempt(f"generate_batch, {num_requests} requests", **facts):
            # Larger works get more of the time.
            share = num_requests**0.5 / sum(each**0.5 for each in counts[place:])
            _generate(bench, model, name, num_requests, most_output, bench.left_s * share)


def _work(num_requests: int, most_output: int) -> str:
    return f"{num_requests} requests, outputs up to {most_output}"


def _generate(
    bench: Bench, model: Any, name: str, num_requests: int, whole_output: int, seconds: float
) -> None:
    """Measure these requests, in `seconds` in total."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    until_s = time.monotonic() + seconds
    submits = yardstick(bench.sizes, num_requests, whole_output, SHAPES[name]["vocab_size"])
    blocks = sum(
        math.ceil((len(each.prompt_token_ids) + each.sampling.max_tokens) / PAGE_SIZE) + 1
        for each in submits
    )
    page_size = {"page_size": PAGE_SIZE}
    if "page_size" not in {each.name for each in fields(ContinuousBatchingConfig)}:
        page_size = {"block_size": PAGE_SIZE}  # its name until transformers 5.17
    settings = ContinuousBatchingConfig(
        **page_size,
        num_blocks=blocks + 1,
        max_batch_tokens=bench.sizes.budget,
        allow_block_sharing=False,
    )
    generation = GenerationConfig(
        max_new_tokens=whole_output, eos_token_id=-1, pad_token_id=0, do_sample=False
    )
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=settings
    ) as manager:
        most_output = min(whole_output, bench.sizes.peer_first_output)
        _run(manager, submits[:NUM_WARM_UPS], most_output, until_s)
        taken_s, num_tokens = _run(manager, submits, most_output, until_s)
        # Time grows at most in proportion to the output length, except for the longer contexts.
        left_s = until_s - time.monotonic()
        longer = min(whole_output, int(most_output * left_s / (taken_s * GROWTH)))
        if longer > 2 * most_output:
            with contextlib.suppress(TimeoutError):  # the result with short outputs then counts
                taken_s, num_tokens = _run(manager, submits, longer, until_s + STOP_S)
                most_output = longer
        work = _work(num_requests, most_output)
        facts = {"contender": "generate_batch", "work": work, "is_cut": most_output < whole_output}
        facts |= {"num_requests": num_requests, "most_output": most_output}
        facts |= {"num_output_tokens": num_tokens, "output_tokens_per_s": num_tokens / taken_s}
        bench.found(f"generate_batch, {work}", [taken_s * 1e3], **facts)


def _run(manager: Any, submits: list[Any], most_output: int, until_s: float) -> tuple[float, int]:
    """Run all requests with outputs cut to `most_output`. Returns seconds and output tokens.

    Raises:
        TimeoutError: `until_s` has passed.
        RuntimeError: a request failed.
    """
    start_s = time.perf_counter()
    for each in submits:
        length = min(each.sampling.max_tokens, most_output)
        manager.add_request(list(each.prompt_token_ids), max_new_tokens=length)
    num_finished = num_tokens = 0
    while num_finished < len(submits):
        result = manager.get_result(timeout=1.0)
        if result is not None:
            if result.error is not None:
                raise RuntimeError(f"generate_batch failed: {result.error}")
            num_finished += 1
            num_tokens += len(result.generated_tokens)
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


# (j)


def measure_exactness(bench: Bench, name: str) -> None:
    source, lengths = random.Random(0), bench.sizes.exact_prompts
    vocab_size = SHAPES[name]["vocab_size"]
    prompts = [[source.randrange(vocab_size) for _ in range(length)] for length in lengths]
    bench.setting(chunk=CHUNK, prompts=list(lengths))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # no TF32
    try:
        expected: list[torch.Tensor] = []
        with bench.attempt(TOKENS):
            expected = _compare_tokens(bench, name, prompts)
        with bench.attempt(LOGITS):
            if not expected:
                raise NotMeasuredError("there are no logits in fp32 to hold them to")
            _compare_logits(bench, name, prompts, expected)
    finally:
        torch.set_float32_matmul_precision(before)


def _compare_tokens(bench: Bench, name: str, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Compare stepscope's tokens in fp32 with transformers'. Returns transformers' logits."""
    ours = _engine_tokens(bench, name, prompts)
    model = load(name, bench.device, torch.float32)
    differ, logits = [], []
    total = len(prompts) * bench.sizes.exact_tokens
    for prompt, mine in zip(prompts, ours, strict=True):
        input_ids = torch.tensor([prompt], device=bench.device)
        output = model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=bench.sizes.exact_tokens,
        )
        theirs = output[0, len(prompt) :].tolist()
        pairs = zip(mine, theirs, strict=True)
        differ.append([place for place, (a, b) in enumerate(pairs) if a != b])
        logits.append(_library_logits(model, prompt, bench.device))
    same = total - sum(map(len, differ))
    facts = {"found": same / total, "wanted": "all", "held": same == total}
    firsts = [each[0] if each else -1 for each in differ]
    bench.found(TOKENS, [], **facts, num_equal=same, num_tokens=total, first_differences=firsts)
    del model
    give_back_memory(bench.device)
    return logits


def _engine_tokens(bench: Bench, name: str, prompts: list[list[int]]) -> list[list[int]]:
    sizes = bench.sizes
    longest = max(map(len, prompts)) + sizes.exact_tokens
    config = EngineConfig(
        model=RANDOM_PREFIX + name,
        device=str(bench.device),
        dtype="float32",
        max_model_len=longest,
        token_capacity=max(longest, CHUNK),
        seq_capacity=sizes.seq_capacity,
        kv_memory="1GB" if bench.is_gpu else sizes.kv_memory,
    )
    knobs = Knobs(max_num_batched_tokens=CHUNK, max_num_seqs=8)
    submits = [submit(f"exact-{i}", each, sizes.exact_tokens) for i, each in enumerate(prompts)]
    with opened(config, knobs) as engine:
        info = engine.core.info
        bench.setting(
            fp32_attention=info.attention_backend, fp32_implementation=info.implementation
        )
        tokens = [stream.token_ids for stream in whole_run(bench, engine, submits).streams]
    if bench.is_gpu:
        gc.unfreeze()  # the engine froze its model, whose memory the library's model needs
        give_back_memory(bench.device)
    return tokens


def _compare_logits(
    bench: Bench, name: str, prompts: list[list[int]], expected: list[torch.Tensor]
) -> None:
    device = bench.device
    model = load(name, device, torch.bfloat16)
    theirs = [_library_logits(model, prompt, device) for prompt in prompts]
    del model
    give_back_memory(device)
    folder = checkpoint.locate(RANDOM_PREFIX + name, lambda what, share: None)
    config, most = loader.load_config(folder, RANDOM_PREFIX + name), max(map(len, prompts))
    where = (torch.bfloat16, device, lambda what, share: None)
    decoder = loader.load_model(folder, RANDOM_PREFIX + name, config, "lean", most, *where)
    backend, _ = choose("auto", str(device), torch.bfloat16)
    bench.setting(bf16_attention=backend.name)
    ours = [_our_logits(decoder, backend, prompt) for prompt in prompts]
    # Root mean square of the difference, over that of the correct logits.
    our_errors, their_errors = (
        [float((a - b).norm() / b.norm()) for a, b in zip(side, expected, strict=True)]
        for side in (ours, theirs)
    )
    means = [max(sum(each) / len(each), LEAST_ERROR) for each in (our_errors, their_errors)]
    ratio = means[0] / means[1]
    facts = {"found": ratio, "wanted": f"up to {TOLERANCE:g}", "held": ratio <= TOLERANCE}
    bench.found(LOGITS, [], **facts, our_errors=our_errors, their_errors=their_errors)


def _library_logits(model: Any, prompt: list[int], device: torch.device) -> torch.Tensor:
    with torch.inference_mode():
        output = model(torch.tensor([prompt], device=device), logits_to_keep=1)
    return output.logits[0, -1].float()


def _our_logits(model: Model, backend: Any, prompt: list[int]) -> torch.Tensor:
    """Return stepscope's logits after a prompt. It runs as one step, with its own KV blocks."""
    shape, device, count = model.kv_shape, model.device, len(prompt)
    num_blocks = -(-count // BLOCK_SIZE)
    size = (num_blocks, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    zeros = partial(torch.zeros, size, dtype=model.dtype, device=device)
    caches = [LayerCache(zeros(), zeros()) for _ in range(shape.num_layers)]
    batch = PagedBatch(
        query_starts=np.array([0, count]),
        context_lens=np.array([count]),
        block_tables=np.arange(num_blocks)[None],
        slot_mapping=torch.arange(count, device=device),
        block_size=BLOCK_SIZE,
        device=device,
    )
    with torch.inference_mode():
        logits = model.forward(
            torch.tensor(prompt, device=device),
            torch.arange(count, device=device),
            StepContext(batch, caches, backend),
            torch.tensor([count - 1], device=device),
        )
    return logits[0].float()
