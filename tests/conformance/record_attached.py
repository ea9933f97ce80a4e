"""Record what vLLM's own scheduler returns and holds, call by call, without running a model.

`tests/adapters` plays the result through the adapter, on any machine. In vLLM's environment, with
stepscope installed beside it:

    python tests/conformance/record_attached.py tests/adapters/schedules

writes `VERSION-CASE.jsonl` there. With `--v2` the scheduler speaks to the second model runner, the
one for GPUs: `VERSION_v2-CASE.jsonl`. The first line says what the scheduler was built with and
which attributes it has. Every other line is one call: what went in, what came out, and what changed
in the scheduler. No tokens are kept.
"""

import argparse
import json
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from record_vllm import HAS_CADENCE, MODEL, drafts_of, make_request, make_scheduler, result_of
from vllm import PoolingParams, __version__
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_group_id, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched import interface
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

OVER = "deferred_waiting"  # of requests that it passes over
QUEUES = ("waiting", "skipped_waiting", "kv_holding_waiting", OVER)
OPTIONAL = ("max_num_active_reqs", "scheduler_reserve_full_isl", "local_prefill_interval")
CADENCE = ("num_executed_steps", "last_prefill_step", "prefill_capacity_bound")
MAX_STEPS = 400
# What becomes of each request in the case with a connector.
_HERE, _THERE = "do_remote_prefill", "do_remote_decode"
CONNECTED = {0: _THERE, 1: _HERE, 3: _HERE, 4: _THERE}


class Tape:
    """Calls the scheduler and keeps a line of each call."""

    def __init__(self, scheduler: Scheduler, case: dict[str, Any]) -> None:
        self._scheduler = scheduler
        self._requests: dict[str, Request] = {}
        self._before: dict[str, Any] = {}
        self._hashed: set[int] = set()
        manager = scheduler.kv_cache_manager
        self._has_groups = "groups" in case
        self._has_encoder = "encoder_tokens" in case
        self._freed: list[int] = []
        if self._has_groups:
            free = manager.block_pool.free_blocks

            def free_blocks(blocks: Iterable[Any]) -> None:
                blocks = list(blocks)
                free(blocks)
                self._freed += [b.block_id if b.block_hash is None else -b.block_id for b in blocks]

            manager.block_pool.free_blocks = free_blocks
        self._loads: dict[str, list[Any]] = {}  # how many tokens, and into which blocks
        if "kv_role" in case:
            allocate = manager.allocate_slots

            def allocate_slots(request: Request, *args: Any, **kwargs: Any) -> Any:
                blocks = allocate(request, *args, **kwargs)
                if blocks is not None and kwargs.get("delay_cache_blocks"):
                    name = request.request_id
                    ids = [list(each) for each in manager.get_block_ids(name)]
                    self._loads[name] = [kwargs["num_external_computed_tokens"], ids]
                return blocks

            manager.allocate_slots = allocate_slots
        optional = {name: getattr(scheduler, name) for name in OPTIONAL if hasattr(scheduler, name)}
        self.lines: list[dict[str, Any]] = [
            {
                "vllm": __version__,
                "is_asynchronous": case["is_asynchronous"],
                "block_size": scheduler.block_size,
                "num_blocks": manager.block_pool.num_gpu_blocks,
                "max_num_seqs": scheduler.max_num_running_reqs,
                "max_model_len": scheduler.max_model_len,
                "max_num_batched_tokens": scheduler.max_num_scheduled_tokens,
                "queues": [name for name in QUEUES if hasattr(scheduler, name)],
                "optional": optional,
                "watermark_blocks": getattr(manager, "watermark_blocks", None),
                "max_loras": case.get("max_loras"),
                "policy": case.get("policy", "fcfs"),
            }
            | {name: case[name] for name in ("groups", "kv_role", "encoder_tokens") if name in case}
        ]

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._scheduler.add_request(request)
        self.keep(
            "add",
            id=request.request_id,
            prompt=request.num_prompt_tokens,
            max_tokens=request.max_tokens,
            priority=request.priority,
            transfer=getattr(request, "kv_transfer_params", None) or {},
            pooling=[True] if request.pooling_params is not None else [],
            adapter=[] if request.lora_request is None else request.lora_request.lora_name,
            picture=[True] if request.mm_features else [],
        )

    def schedule(self) -> Any:
        might_prefill = self._scheduler.waiting or any(
            getattr(request, "is_prefill_chunk", False) for request in self._scheduler.running
        )
        output = self._scheduler.schedule()
        tokens, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
        # In the cases with a cadence nothing else keeps prompts out of a step.
        held = bool(might_prefill and tokens and all(n == 1 for n in tokens.values()))
        again, news = output.scheduled_cached_reqs, output.scheduled_new_reqs
        computed = again.num_computed_tokens
        self.keep(
            "schedule",
            tokens=tokens,
            drafts={name: len(each) for name, each in drafts.items()},
            new=[[new.req_id, new.block_ids, new.num_computed_tokens] for new in news],
            again=list(map(list, zip(again.req_ids, again.new_block_ids, computed, strict=True))),
            resumed=sorted(again.resumed_req_ids),
            preempted=sorted(output.preempted_req_ids or ()),
            held_prefills=held if getattr(self._scheduler, OPTIONAL[2], 1) > 1 else [],
            held=sorted(each.request_id for each in getattr(self._scheduler, OVER, ())),
        )
        return output

    def keep(self, call: str, **fields: Any) -> None:
        """Write the line of a call that was made, and what it changed."""
        state = dict(self._state())
        changed = {key: value for key, value in state.items() if self._before.get(key) != value}
        self._before.update(changed)
        names = [key for key in changed if key.startswith("request ")]
        requests = {key.partition(" ")[2]: changed.pop(key) for key in names}
        pool = self._scheduler.kv_cache_manager.block_pool
        hashed = {i for i, block in enumerate(pool.blocks) if block.block_hash is not None}
        fields = {key: value for key, value in fields.items() if value not in ([], {})}
        line: dict[str, Any] = {"call": call, **fields, **changed}
        # Freed blocks that stay cached are negative.
        more = {"loads": self._loads, "freed": self._freed, "requests": requests}
        line |= {key: value for key, value in more.items() if value}
        self._loads, self._freed = {}, []
        if hashed != self._hashed:
            line["hashed"] = sorted(hashed - self._hashed)
            line["unhashed"] = sorted(self._hashed - hashed)
            self._hashed = hashed
        self.lines.append(line)

    def _state(self) -> Iterator[tuple[str, Any]]:
        scheduler = self._scheduler
        for name, each in self._requests.items():
            counts = each.num_computed_tokens, each.num_tokens, each.num_output_tokens
            yield f"request {name}", [*counts, each.status.name]
        if getattr(scheduler, OPTIONAL[2], 1) > 1:
            yield "cadence", [getattr(scheduler, name) for name in CADENCE]
            chunks = [each.request_id for each in scheduler.running if each.is_prefill_chunk]
            yield "chunks", chunks
        yield "ended", sorted(scheduler.finished_req_ids)
        yield "running", [request.request_id for request in scheduler.running]
        for name in QUEUES:
            if hasattr(scheduler, name):
                yield name, len(getattr(scheduler, name))
        if self._has_encoder:
            yield "queue", [request.request_id for request in scheduler.waiting]
        yield "free", scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        if self._has_groups:
            managers = scheduler.kv_cache_manager.coordinator.single_type_managers
            tables = [list(each.req_to_blocks.values()) for each in managers]
            ids = [{each.block_id for blocks in table for each in blocks} - {0} for table in tables]
            yield "used", [len(each) for each in ids]
            blocks = scheduler.kv_cache_manager.block_pool.blocks[1:]
            hashes = [each.block_hash for each in blocks if not each.ref_cnt and each.block_hash]
            tables_of = [get_group_id(each) for each in hashes]
            if scheduler.connector is not None:
                yield "loading", self._num_held("WAITING_FOR_REMOTE_KVS")
                yield "sending", self._num_held("FINISHED")
            yield "cached", [tables_of.count(number) for number in range(len(managers))]

    def _num_held(self, status: str) -> int:
        """How many blocks are held by requests that vLLM keeps with this status."""
        scheduler = self._scheduler
        names = [k for k, each in scheduler.requests.items() if each.status.name.startswith(status)]
        tables = [scheduler.kv_cache_manager.get_block_ids(name) for name in names]
        return sum(bool(block) for table in tables for ids in table for block in ids)


def record(case: dict[str, Any], model: Path, *, is_v2: bool) -> list[dict[str, Any]]:
    """Run one case to its end; asynchronous ones schedule a step while another is in flight."""
    scheduler = make_scheduler(case, model, case["is_asynchronous"])
    if is_v2:
        scheduler.use_v2_model_runner = True
    if (num_tokens := case.get("encoder_tokens")) is not None:
        # The model has no encoder, and vLLM's scheduler does not need one.
        scheduler.max_num_encoder_input_tokens = num_tokens
        scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=num_tokens)
    tape = Tape(scheduler, case)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(case["block_size"], sha256)
    most_in_flight = 2 if case["is_asynchronous"] else 1
    in_flight: deque[tuple[Any, Any]] = deque()
    last = max(each["arrival_step"] for each in case["requests"])
    for step in range(MAX_STEPS):
        for number, wanted in enumerate(case["requests"]):
            if wanted["arrival_step"] == step:
                request = make_request(number, wanted, case, hasher)
                if case.get("pools"):
                    request.sampling_params, request.pooling_params = None, PoolingParams()
                if (num_tokens := wanted.get("picture")) is not None:
                    place, name = PlaceholderRange(offset=0, length=num_tokens), f"picture {number}"
                    request.mm_features = [MultiModalFeatureSpec(None, "image", name, place)]
                tape.add(request)
        if (budget := case.get("budget_at", {}).get(step)) is not None:
            scheduler.max_num_scheduled_tokens = budget
            tape.keep("budget", budget=budget)
        if step in case.get("reset_at", ()):
            scheduler.reset_prefix_cache(reset_running_requests=True)
            tape.keep("reset")
        if (state := case.get("pause_at", {}).get(step)) is not None:
            scheduler.set_pause_state(interface.PauseState[state])
            tape.keep("pause", state=state)
        if (ids := case.get("abort_at", {}).get(step)) is not None:
            scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)
            tape.keep("finish", ids=ids)
        output = tape.schedule()
        wanted_tokens = case["requests"] if "speculative" in case else None
        if case["is_asynchronous"]:
            draft_ahead(scheduler, output, wanted_tokens, step)
        result = result_of(scheduler, output, wanted_tokens)
        if case.get("pools"):
            whole = [bool(tokens) for tokens in result.sampled_token_ids]
            result.pooler_output = [torch.zeros(1) if each else None for each in whole]
            result.sampled_token_ids = []
        if "kv_role" in case:
            done = case["transferred_at"].get(step, {})
            result.kv_connector_output = KVConnectorOutput(**{k: set(v) for k, v in done.items()})
        in_flight.append((output, result))
        if len(in_flight) == most_in_flight:
            output, result = in_flight.popleft()
            scheduler.update_from_output(output, result)
            tape.keep("update")
            if wanted_tokens and not case["is_asynchronous"]:
                scheduler.update_draft_token_ids(drafts_of(scheduler, result, case))
        if step > last and not scheduler.requests and not output.num_scheduled_tokens:
            break
    for output, result in in_flight:
        scheduler.update_from_output(output, result)
        tape.keep("update")
    assert not scheduler.requests, "the case did not end"
    return tape.lines


def draft_ahead(
    scheduler: Scheduler, output: Any, wanted: list[dict[str, Any]] | None, step: int
) -> None:
    """Replace the placeholders of drafts as vLLM's worker does: some are right, the rest not."""
    drafts = output.scheduled_spec_decode_tokens
    for name, placeholders in drafts.items():
        assert wanted is not None
        first = scheduler.requests[name].num_output_tokens
        right = wanted[int(name)]["output"][first : first + (step + int(name)) % 4]
        drafts[name] = (right + placeholders)[: len(placeholders)]


def requests(*wanted: tuple[int, int, int]) -> list[dict[str, int]]:
    """Requests from tuples of (arrival step, prompt tokens, output tokens)."""
    names = ("arrival_step", "prompt_len", "output_len")
    return [dict(zip(names, each, strict=True)) for each in wanted]


def shared_prompts() -> list[dict[str, Any]]:
    """Three groups of prompts with a shared prefix each, in a pool that cannot keep them all."""
    found = []
    for number in range(12):
        family = [1000 * (number % 3) + position for position in range(64)]
        own = [5000 + 100 * number + position for position in range(5 + number)]
        found.append({"arrival_step": 2 * number, "tokens": family + own, "output_len": 6})
    for each in found:
        each["prompt_len"] = len(each["tokens"])
    return found


def repeated_texts() -> list[dict[str, Any]]:
    """Texts that mostly repeat themselves, so that some drafts are right and some are wrong."""
    found = []
    for number in range(8):
        phrase = [100 * number + position for position in range(5)]
        text = [token for turn in range(30) for token in (*phrase, 1000 * number + turn % 7)]
        end = 20 + 3 * number
        lengths = {"arrival_step": number // 2, "prompt_len": end, "output_len": 24}
        found.append(lengths | {"tokens": text[:end], "output": text[end : end + 40]})
    return found


def case(budget: int, wanted: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A case with a token budget and requests; `more` replaces what most cases have alike."""
    return {
        "block_size": 16,
        "max_model_len": 512,
        "max_num_seqs": 16,
        "num_blocks": 128,
        "is_asynchronous": False,
        "max_num_batched_tokens": budget,
        "requests": wanted,
        **more,
    }


def each_with(wanted: list[dict[str, Any]], name: str, values: Iterable[Any]) -> list[Any]:
    """Requests with a further field each; None: not this one, nor those after the last value."""
    found = zip_longest(wanted, values)
    return [each if value is None else each | {name: value} for each, value in found]


def cases() -> dict[str, dict[str, Any]]:
    chunked = requests((0, 200, 6), (0, 10, 20), (2, 150, 5), (4, 30, 12), (9, 90, 1))
    pressed = requests(*((number // 3, 20 + 7 * number, 24) for number in range(9)))
    aborts = requests(
        (0, 100, 30), (0, 40, 30), (0, 200, 30), (1, 60, 30), (1, 30, 12), (2, 70, 30), (3, 50, 8)
    )
    paused = requests((0, 40, 12), (0, 60, 30), (1, 20, 30), (9, 30, 12), (22, 30, 8))
    moved = requests((0, 90, 3), (1, 70, 40), (1, 30, 9), (2, 100, 9), (4, 60, 2))
    # Longer than the one token by which decodes are told.
    spaced = requests((0, 20, 50), (3, 30, 30), (8, 150, 6), (30, 60, 9), (31, 60, 5))
    ranked = requests((0, 20, 4), (0, 20, 8), (1, 30, 4), (2, 20, 6), (3, 40, 9), (4, 9, 3))
    adapted = requests((0, 30, 8), (1, 20, 6), (1, 40, 5), (2, 20, 4), (3, 9, 5), (4, 20, 9))
    # During prefill, decoding, waiting, and once more, when nothing is left to abort.
    abort_at = {1: ["2"], 6: ["1"], 7: ["6"], 9: ["1", "3"], 12: ["0", "5"]}
    pause_at = {8: "PAUSED_NEW", 16: "UNPAUSED", 20: "PAUSED_ALL", 26: "UNPAUSED"}
    tight, ahead = {"num_blocks": 17, "reserve": "none"}, {"is_asynchronous": True}
    lookup = {"num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
    drafts = {"speculative": "ngram"} | lookup | tight
    full = ("FullAttentionSpec", {})
    window = ("SlidingWindowSpec", {"sliding_window": 40})
    chunks = ("ChunkedLocalAttentionSpec", {"attention_chunk_size": 64})
    mamba = ("MambaSpec", {"mamba_cache_mode": "align"})
    roomy = {"num_blocks": 40, "reserve": "none"}
    windows = roomy | {"abort_at": {30: ["2"], 31: ["9"]}}
    long_outputs, outputs = (
        [each | {"output_len": length} for each in shared_prompts()] for length in (70, 50)
    )
    kinds = [(number, CONNECTED.get(number)) for number in range(5)]
    wanted = [kind and {kind: True, "remote_request_id": f"there-{n}"} for n, kind in kinds]
    transfers = each_with(moved, "transfer", wanted)
    # The keys and values of 1 come late, those of 3 never; 0 and 4 are sent after their end.
    transferred_at = {
        8: {"finished_recving": ["1"]},
        12: {"finished_sending": ["0"]},
        20: {"finished_sending": ["4"], "finished_recving": ["3"]},
    }
    connector = {"kv_role": "kv_both", "transferred_at": transferred_at, "abort_at": {16: ["3"]}}
    pictured = requests((0, 90, 6), (0, 90, 6), (0, 20, 6), (0, 90, 4), (0, 30, 9), (0, 150, 5))
    priorities = each_with(ranked, "priority", (0, 0, 2, 1, 0, 2))
    return {
        "chunked": case(64, chunked, budget_at={5: 24, 14: 64}),
        "preemption": case(96, pressed, **tight),
        "prefix": case(128, shared_prompts(), num_blocks=14),
        "abort": case(64, aborts, max_num_seqs=4, num_blocks=24, abort_at=abort_at),
        # With preemptions, and requests that end among their drafts.
        "speculation": case(96, repeated_texts(), abort_at={9: ["3"]}, **drafts),
        "pause": case(64, paused, reset_at=[5, 23], pause_at=pause_at),
        "pooling": case(64, requests((0, 40, 1), (0, 150, 1), (1, 1, 1), (3, 64, 1)), pools=True),
        "windows": case(96, long_outputs, groups=[full, window, window], **windows),
        "hybrid": case(96, outputs, groups=[full, chunks, mamba], reset_at=[40], **roomy),
        "windows_ahead": case(96, long_outputs, groups=[full, window], **windows | ahead),
        "connector": case(96, transfers, num_blocks=40, groups=[full, window], **connector),
        # From 0.33 on.
        "cadence": case(48, spaced, prefill_schedule_interval=4),
        "priority": case(64, priorities, max_num_seqs=2, policy="priority"),
        "adapters": case(64, each_with(adapted, "adapter", "aabba"), max_loras=1),
        # One picture fits into a step.
        "encoder": case(
            256,
            each_with(pictured, "picture", (80, 80, None, 80)),
            num_blocks=18,
            encoder_tokens=100,
        ),
        "speculation_ahead": case(
            96, repeated_texts(), **drafts | ahead | {"speculative": "ngram_gpu"}
        ),
        "asynchronous": case(96, pressed, abort_at={8: ["1"], 13: ["4", "8"]}, **tight | ahead),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Record the calls of vLLM's own scheduler.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--v2", action="store_true", help="as for vLLM's second model runner")
    parser.add_argument("--case", help="only this one")
    given = parser.parse_args()
    folder: Path = given.folder
    dumps: Callable[[object], str] = lambda line: json.dumps(line, separators=(",", ":"))  # noqa: E731
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary)
        (model / "config.json").write_text(json.dumps(MODEL))
        version = f"{__version__}_v2" if given.v2 else __version__
        for name, case in cases().items():
            if given.case not in (None, name) or (name == "cadence" and not HAS_CADENCE):
                continue
            lines = record(case, model, is_v2=given.v2)
            path = folder / f"{version}-{name}.jsonl"
            path.write_text("".join(dumps(line) + "\n" for line in lines))
            print(f"{path}: {len(lines)} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
