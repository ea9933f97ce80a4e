"""(j) Exactness on the device: stepscope against transformers, with the same weights.

In fp32, stepscope runs all requests together, with prompts in chunks. It must produce the greedy
tokens that `generate` produces for each request alone. In bf16, near-ties may give other tokens, so
the logits after each prompt are compared with the fp32 logits of the same model. Our error may be
up to 1.5 times transformers' own error in bf16, because both round and neither is exact.
"""

import contextlib
import gc
import random
from typing import Any

import numpy as np
import torch

from stepscope.engine.bench.gpu.measure import transformers_side
from stepscope.engine.bench.gpu.measure.bench import Bench, NotMeasuredError
from stepscope.engine.bench.gpu.measure.streams import Streams
from stepscope.engine.execution.machine.devices import give_back_memory
from stepscope.engine.models import loader, random_model
from stepscope.engine.models.model import Model, StepContext
from stepscope.engine.models.random_shapes import PREFIX, SHAPES
from stepscope.engine.process.serve import open_engine
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.settings.engine_config import EngineConfig
from stepscope.engine.protocol.settings.knobs import Knobs
from stepscope.engine.protocol.settings.sampling_params import SamplingParams
from stepscope.kernels.dispatch.backends import choose
from stepscope.kernels.paged_attention import PagedBatch

CHUNK = 48  # token budget: small, so that prompts are split and share steps with decodes
BLOCK_SIZE = 16
TOLERANCE = 1.5  # our error over transformers' error, at most
LEAST_ERROR = 1e-3  # smaller errors count as this, because they are noise


def measure(bench: Bench, name: str) -> None:
    source = random.Random(0)
    vocab_size = SHAPES[name]["vocab_size"]
    prompts = [
        [source.randrange(vocab_size) for _ in range(length)]
        for length in bench.sizes.exact_prompts
    ]
    bench.setting(chunk=CHUNK, prompts=list(bench.sizes.exact_prompts))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # no TF32
    try:
        expected: list[torch.Tensor] = []
        with bench.attempt("fp32: greedy tokens equal transformers'"):
            expected = _compare_tokens(bench, name, prompts)
        with bench.attempt("bf16: error of the logits / transformers' error"):
            if not expected:
                raise NotMeasuredError("there are no logits in fp32 to hold them to")
            _compare_logits(bench, name, prompts, expected)
    finally:
        torch.set_float32_matmul_precision(before)


def _compare_tokens(bench: Bench, name: str, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Compare stepscope's tokens in fp32 with transformers'.

    Returns transformers' logits per prompt.
    """
    ours = _engine_tokens(bench, name, prompts)
    bench.doing("generate of transformers in fp32")
    model = transformers_side.load(name, bench.device, torch.float32)
    theirs, logits = [], []
    for prompt in prompts:
        input_ids = torch.tensor([prompt], device=bench.device)
        output = model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=bench.sizes.exact_tokens,
        )
        theirs.append(output[0, len(prompt) :].tolist())
        logits.append(_library_logits(model, prompt, bench.device))
    same = sum(a == b for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True))
    total = sum(map(len, theirs))
    bench.found(
        "fp32: greedy tokens equal transformers'",
        [],
        found=same / total,
        wanted="all",
        held=same == total,
        num_equal=same,
        num_tokens=total,
        first_differences=[
            next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), -1)
            for x, y in zip(ours, theirs, strict=True)
        ],
    )
    del model
    give_back_memory(bench.device)
    return logits


def _engine_tokens(bench: Bench, name: str, prompts: list[list[int]]) -> list[list[int]]:
    sizes = bench.sizes
    longest = max(map(len, prompts)) + sizes.exact_tokens
    config = EngineConfig(
        model=PREFIX + name,
        device=str(bench.device),
        dtype="float32",
        max_model_len=longest,
        token_capacity=max(longest, CHUNK),
        seq_capacity=8,
        kv_memory="1GB" if bench.is_gpu else sizes.kv_memory,
    )
    knobs = Knobs(max_num_batched_tokens=CHUNK, max_num_seqs=8)
    submits = [
        Submit(
            client_id=f"exact-{i}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=sizes.exact_tokens, ignore_eos=True),
            with_text=False,
        )
        for i, prompt in enumerate(prompts)
    ]

    def progress(what: str, share: float) -> None:
        bench.doing(f"fp32, {what}")

    with open_engine(config, knobs, progress=progress) as (core, intake, _):
        bench.setting(
            fp32_attention=core.info.attention_backend, fp32_implementation=core.info.implementation
        )
        run = Streams(core, intake, submits, most_s=max(1.0, bench.left_s))
        run.run()
        if run.is_partial:
            raise NotMeasuredError("its time was up")
        tokens = [stream.token_ids for stream in run.streams]
    if bench.is_gpu:
        gc.unfreeze()  # the engine froze its model, whose memory the library's model needs
        give_back_memory(bench.device)
    return tokens


def _compare_logits(
    bench: Bench, name: str, prompts: list[list[int]], expected: list[torch.Tensor]
) -> None:
    bench.doing("logits in bf16")
    model = transformers_side.load(name, bench.device, torch.bfloat16)
    library = [
        _error(_library_logits(model, prompt, bench.device), right)
        for prompt, right in zip(prompts, expected, strict=True)
    ]
    del model
    give_back_memory(bench.device)
    decoder = _decoder(bench, name, max(map(len, prompts)))
    backend, _ = choose("auto", str(bench.device), torch.bfloat16)
    bench.setting(bf16_attention=backend.name)
    ours = [
        _error(_our_logits(decoder, backend, prompt), right)
        for prompt, right in zip(prompts, expected, strict=True)
    ]
    mean_ours, mean_library = sum(ours) / len(ours), sum(library) / len(library)
    ratio = max(mean_ours, LEAST_ERROR) / max(mean_library, LEAST_ERROR)
    bench.found(
        "bf16: error of the logits / transformers' error",
        [],
        found=ratio,
        wanted=f"up to {TOLERANCE:g}",
        held=ratio <= TOLERANCE,
        our_errors=ours,
        their_errors=library,
    )


def _error(logits: torch.Tensor, right: torch.Tensor) -> float:
    """Return the root mean square of the difference, divided by that of the correct logits."""
    return float((logits - right).norm() / right.norm())


def _library_logits(model: Any, prompt: list[int], device: torch.device) -> torch.Tensor:
    with torch.inference_mode():
        output = model(torch.tensor([prompt], device=device), logits_to_keep=1)
    logits: torch.Tensor = output.logits[0, -1].float()
    return logits


def _decoder(bench: Bench, name: str, max_model_len: int) -> Model:
    model = PREFIX + name
    folder = random_model.ensure(model)
    return loader.load_model(
        folder,
        model,
        loader.load_config(folder, model),
        "lean",
        max_model_len,
        torch.bfloat16,
        bench.device,
        lambda what, share: None,
    )


def _our_logits(model: Model, backend: Any, prompt: list[int]) -> torch.Tensor:
    """Return stepscope's logits after a prompt. It runs as one step, with its own KV blocks."""
    shape, device, count = model.kv_shape, model.device, len(prompt)
    num_blocks = -(-count // BLOCK_SIZE)
    size = (num_blocks, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    keys, values = (
        [torch.zeros(size, dtype=model.dtype, device=device) for _ in range(shape.num_layers)]
        for _ in range(2)
    )
    batch = PagedBatch(
        query_starts=np.array([0, count]),
        context_lens=np.array([count]),
        block_tables=np.arange(num_blocks)[None],
        slot_mapping=torch.arange(count, device=device),
        block_size=BLOCK_SIZE,
        device=device,
    )
    with torch.inference_mode(), contextlib.ExitStack():
        logits = model.forward(
            torch.tensor(prompt, device=device),
            torch.arange(count, device=device),
            StepContext(batch, keys, values, backend),
            torch.tensor([count - 1], device=device),
        )
    return logits[0].float()
