"""transformers' `generate` (a padded batch) and `generate_batch` (continuous batching).

Run by bench_throughput.py. All prompts of a piece of work are of equal length, so nothing is
padded: the kindest case for `generate`.
"""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from protocol import Done, Work, serve

PAGE_SIZE, MAX_BATCH_TOKENS = 256, 2048


def load(settings: dict[str, Any]) -> tuple[Callable[[Work], Done], str]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(len(settings["cores"]))
    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(
        settings["model"],
        dtype=getattr(torch, settings["dtype"]),
        attn_implementation="sdpa",
        local_files_only=True,
    ).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.generation_config.do_sample = False
    if settings["contender"] == "generate":
        return partial(padded, model), f"{settings['dtype']}, sdpa"
    how = f"pages of {PAGE_SIZE}, {MAX_BATCH_TOKENS} tokens a step"
    return partial(continuous, model), f"{settings['dtype']}, sdpa, {how}"


def padded(model: Any, work: Work) -> Done:
    import torch

    input_ids = torch.tensor(work.prompts(model.config.vocab_size))
    start_s = time.perf_counter()
    output = model.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=work.num_output_tokens,
    )
    seconds = time.perf_counter() - start_s
    return Done(output[:, work.num_prompt_tokens :].tolist(), seconds)


def continuous(model: Any, work: Work) -> Done:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    prompts = work.prompts(model.config.vocab_size)
    generation = GenerationConfig(
        max_new_tokens=work.num_output_tokens, eos_token_id=-1, pad_token_id=0, do_sample=False
    )
    # As many blocks as the work needs: its mask spans the whole cache.
    num_tokens = work.num_prompt_tokens + work.num_output_tokens
    batching = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=work.num_requests * math.ceil(num_tokens / PAGE_SIZE) + 1,
        max_batch_tokens=MAX_BATCH_TOKENS,
        allow_block_sharing=False,
        use_async_batching=False,
    )
    results: dict[str, list[int]] = {}
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching
    ) as manager:
        start_s = time.perf_counter()
        ids = manager.add_requests(prompts, max_new_tokens=work.num_output_tokens)
        while len(results) < len(prompts):
            result = manager.get_result(timeout=1.0)
            if result is not None:
                assert result.error is None, result.error
                results[result.request_id] = list(result.generated_tokens)
            elif not manager.is_running():
                raise RuntimeError("the manager of generate_batch has stopped")
        seconds = time.perf_counter() - start_s
    return Done([results[each] for each in ids], seconds)


if __name__ == "__main__":
    serve(load)
