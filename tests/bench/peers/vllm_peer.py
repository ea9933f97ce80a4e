"""vLLM, offline (`LLM`), in its own virtual environment. Run by bench_throughput.py.

The engine core runs in this process: on one core a second process only takes turns with the first.
"""

import os
import time
from collections.abc import Callable
from typing import Any

from protocol import Done, Work, serve


def load(settings: dict[str, Any]) -> tuple[Callable[[Work], Done], str]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, settings["cores"]))
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["DO_NOT_TRACK"] = "1"
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=settings["model"],
        dtype=settings["dtype"],
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        disable_log_stats=True,
    )
    vocab_size = llm.llm_engine.model_config.get_vocab_size()

    def run(work: Work) -> Done:
        prompts = [{"prompt_token_ids": ids} for ids in work.prompts(vocab_size)]
        params = SamplingParams(
            temperature=0.0, max_tokens=work.num_output_tokens, ignore_eos=True, detokenize=False
        )
        start_s = time.perf_counter()
        results = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start_s
        return Done([list(each.outputs[0].token_ids) for each in results], seconds)

    how = f"{settings['dtype']}, compiled, in one process"
    return run, how


if __name__ == "__main__":
    serve(load)
