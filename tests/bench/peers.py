"""The contenders of bench_throughput.py: each a process of its own that runs this file.

`peers.py SETTINGS`, a JSON object. A contender has its own threads, memory and packages. It loads
its model, says how it works, and then does one piece of work a line of JSON, answered by a line,
until its input ends. What the libraries print goes to standard error. At import it needs the
standard library only, since vLLM is in an environment of its own.
"""

import contextlib
import ctypes
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

PR_SET_PDEATHSIG = 1  # of prctl(2)
PAGE_SIZE, MAX_BATCH_TOKENS = 256, 2048  # of generate_batch


class Work(NamedTuple):
    """Requests of equal lengths, all submitted at once, greedy, without an end token."""

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    seed: int

    def prompts(self, vocab_size: int) -> list[list[int]]:
        # Of all fields, so that no prompt shares a prefix with other work: nothing is cached.
        source = random.Random(repr(self))
        return [
            [source.randrange(vocab_size) for _ in range(self.num_prompt_tokens)]
            for _ in range(self.num_requests)
        ]


class Done(NamedTuple):
    """Output tokens of each request, in the order of the prompts, and what it took."""

    outputs: list[list[int]]
    seconds: float


def pin(cores: list[int]) -> None:
    """Keep this process, and what it starts, on these cores. Call it before importing torch."""
    os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(len(cores))
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


Loaded = tuple[Callable[[Work], Done], str]  # what does a piece of work, and how in words


def load_stepscope(settings: dict[str, Any]) -> Loaded:
    """As `stepscope serve` runs it, telemetry on."""
    import zmq

    from stepscope.engine.bench.measured_run import measure
    from stepscope.engine.process.serve import open_engine
    from stepscope.engine.protocol.commands import Submit
    from stepscope.engine.protocol.settings.engine_config import EngineConfig
    from stepscope.engine.protocol.settings.knobs import Knobs
    from stepscope.engine.protocol.settings.sampling_params import SamplingParams
    from stepscope.engine.transport.sockets import client_socket

    resources = contextlib.ExitStack()
    folder = resources.enter_context(tempfile.TemporaryDirectory())
    config = EngineConfig(
        model=settings["model"],
        dtype=settings["dtype"],
        endpoint=f"ipc://{folder}/engine",
        kv_memory="1GB",
        device="cpu",
    )
    core, intake, vocab_size = resources.enter_context(
        open_engine(config, Knobs(), progress=lambda what, share: None)
    )
    subscriber = resources.enter_context(client_socket(zmq.SUB, None))
    subscriber.rcvhwm = 0
    subscriber.subscribe(b"")
    subscriber.connect(core.info.telemetry_endpoint)

    def run(work: Work) -> Done:
        submits = [
            Submit(
                prompt_token_ids=token_ids,
                sampling=SamplingParams(max_tokens=work.num_output_tokens, ignore_eos=True),
                with_text=False,
            )
            for token_ids in work.prompts(vocab_size)
        ]
        result, requests = measure(core, intake, submits)
        assert not result.num_failed, result.failures
        return Done([each.output_token_ids for each in requests], result.seconds)

    info = core.info
    how = ", ".join(
        part for part in (getattr(info, "implementation", None), info.attention_backend) if part
    )
    return run, f"{info.dtype}, {how}"


def load_transformers(settings: dict[str, Any]) -> Loaded:
    """`generate` (a padded batch) or `generate_batch` (continuous batching).

    All prompts of a piece of work are of equal length: the kindest case for `generate`.
    """
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
    model.generation_config.update(eos_token_id=None, pad_token_id=0, do_sample=False)
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


def load_vllm(settings: dict[str, Any]) -> Loaded:
    """vLLM, offline. Its core runs in this process: a second one on one core only takes turns."""
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


LOADS = {
    "stepscope": load_stepscope,
    "generate": load_transformers,
    "generate_batch": load_transformers,
    "vllm": load_vllm,
}


def main(settings: dict[str, Any]) -> None:
    # A stopped process does not see its input end: it must not outlive the bench.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # no print may break the protocol
    pin(settings["cores"])
    run, how = LOADS[settings["contender"]](settings)
    print(json.dumps({"how": how}), file=answers, flush=True)
    for line in sys.stdin:
        done = run(Work(**json.loads(line)))
        print(json.dumps(done._asdict()), file=answers, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
