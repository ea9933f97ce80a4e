"""vLLM's scheduler as recorded: the same calls return the same values and leave the same state.

`tests/conformance/record_attached.py` makes the recordings in `schedules/`. A method that is
called out of turn fails.
"""

import json
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SCHEDULES = Path(__file__).parent / "schedules"
SECRET_TOKEN = 0x5EC2E7  # every token of every prompt
_CADENCE = ("num_executed_steps", "last_prefill_step", "prefill_capacity_bound")
_QUEUES = ("waiting", "skipped_waiting", "kv_holding_waiting", "deferred_waiting")


FULL = "FullAttentionSpec"  # the adapter knows vLLM's class by this name


class Grammars:
    """vLLM's `StructuredOutputManager`, which vLLM clears first when it shuts down."""

    def __init__(self) -> None:
        self.num_cleared = 0

    def clear_backend(self) -> None:
        self.num_cleared += 1


class PlayedQueue:
    """vLLM's waiting requests: their number, and which it passed over."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.held: list[PlayedRequest] = []

    def __iter__(self) -> "Iterator[PlayedRequest]":
        return iter(self.held)

    def __len__(self) -> int:
        return self.num_waiting


class PlayedRequest:
    """The recorded part of vLLM's `Request`."""

    def __init__(self, line: dict[str, Any]) -> None:
        self.request_id: str = line["id"]
        self.is_prefill_chunk = False
        self.num_prompt_tokens: int = line["prompt"]
        self.prompt_token_ids = [SECRET_TOKEN] * self.num_prompt_tokens
        self.max_tokens: int = line["max_tokens"]
        self.priority: int = line["priority"]
        self.kv_transfer_params: dict[str, object] = line.get("transfer", {})
        self.has_encoder_inputs = "picture" in line
        self.pooling_params: object | None = True if "pooling" in line else None
        adapter = line.get("adapter")
        lora = adapter and SimpleNamespace(lora_name=adapter, lora_int_id=ord(adapter))
        self.lora_request: Any = lora
        self.arrival_time = time.time()
        self.become([0, self.num_prompt_tokens, 0, "WAITING"])

    def become(self, state: list[Any]) -> None:
        self.num_computed_tokens, self.num_tokens, self.num_output_tokens, name = state
        self.status = SimpleNamespace(name=name)


class InProcessWorker:
    """vLLM's worker of one GPU: it keeps and extends the block lists that it gets."""

    def __init__(self) -> None:
        self._tables: dict[str, list[list[int]]] = {}

    def execute(self, output: SimpleNamespace) -> None:
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = new.block_ids
        again = output.scheduled_cached_reqs
        for name, blocks in zip(again.req_ids, again.new_block_ids, strict=True):
            if name in again.resumed_req_ids:
                self._tables[name] = blocks
            elif blocks is not None:
                for known, added in zip(self._tables[name], blocks, strict=True):
                    known.extend(added)


class PlayedScheduler:
    """Replays vLLM's scheduler: its methods consume the recorded lines in order.

    Attributes:
        head: the settings that the scheduler was built with.
        num_free: blocks, as vLLM counts them.
        outputs: those of `schedule()`, in order.
        model_output: what the worker returns for every step.
    """

    def __init__(self, version: str, case: str) -> None:
        text = (SCHEDULES / f"{version}-{case}.jsonl").read_text("utf-8")
        self.head, *lines = map(json.loads, text.splitlines())
        self._lines: Iterator[dict[str, Any]] = iter(lines)
        self.calls = lines
        self.outputs: list[SimpleNamespace] = []
        self.model_output: object = object()
        self.num_free = 0
        self.pause_state: SimpleNamespace | None = None
        self.requests: dict[str, PlayedRequest] = {}
        self._all: dict[str, PlayedRequest] = {}
        self.running: list[PlayedRequest] = []
        self.finished_req_ids: set[str] = set()
        for name in self.head["queues"]:
            setattr(self, name, PlayedQueue())
        self._configure()

    def _configure(self) -> None:
        head = self.head
        for name, value in head["optional"].items():
            setattr(self, name, value)
        budget, self.block_size = head["max_num_batched_tokens"], head["block_size"]
        self.max_num_scheduled_tokens = budget
        self.max_num_running_reqs = head["max_num_seqs"]
        self.max_model_len = head["max_model_len"]
        self.scheduler_config = SimpleNamespace(
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=0,
            enable_chunked_prefill=True,
            policy=head.get("policy", "fcfs"),
            async_scheduling=head["is_asynchronous"],
        )
        self.max_num_encoder_input_tokens = head.get("encoder_tokens", 0)
        self.lora_config = SimpleNamespace(max_loras=head.get("max_loras"))
        self.cache_config = SimpleNamespace(enable_prefix_caching=True)
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(model="played", served_model_name="played"),
            parallel_config=SimpleNamespace(data_parallel_size=1, data_parallel_rank=0),
        )
        groups = []
        for number, (name, fields) in enumerate(head.get("groups", [(FULL, {})])):
            spec = type(name, (SimpleNamespace,), {})(block_size=self.block_size, **fields)
            layers = [f"layer.{2 * number}", f"layer.{2 * number + 1}"]
            groups.append(SimpleNamespace(kv_cache_spec=spec, layer_names=layers))
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=groups)
        self.structured_output_manager = Grammars()
        num_blocks = head["num_blocks"]
        self.pool = SimpleNamespace(
            blocks=[SimpleNamespace(block_id=i, block_hash=None) for i in range(num_blocks)],
            free_blocks=lambda blocks: None,
            num_gpu_blocks=num_blocks,
            get_num_free_blocks=lambda: self.num_free,
        )
        self._loads: dict[str, list[list[int]]] = {}
        self._tables: dict[str, list[int]] = {}
        self.kv_cache_manager = SimpleNamespace(
            block_pool=self.pool,
            allocate_slots=lambda request, **kwargs: "blocks",
            get_block_ids=self._loads.__getitem__,
        )
        self.connector = object() if "kv_role" in head else None
        if head["watermark_blocks"] is not None:
            self.kv_cache_manager.watermark_blocks = head["watermark_blocks"]

    # vLLM's methods

    def add_request(self, request: PlayedRequest) -> None:
        self.requests[request.request_id] = self._all[request.request_id] = request
        self._become("add")

    def schedule(self, throttle_prefills: bool = False) -> SimpleNamespace:
        line = deepcopy(self._become("schedule"))
        again = line.get("again", [])
        news = []
        for name, blocks, num_computed in line.get("new", []):
            new = SimpleNamespace(req_id=name, block_ids=blocks, num_computed_tokens=num_computed)
            new.prompt_token_ids = self._all[name].prompt_token_ids
            news.append(new)
        output = SimpleNamespace(
            num_scheduled_tokens=line.get("tokens", {}),
            scheduled_spec_decode_tokens={
                name: [-1] * number for name, number in line.get("drafts", {}).items()
            },
            total_num_scheduled_tokens=sum(line.get("tokens", {}).values()),
            scheduled_new_reqs=news,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[name for name, _, _ in again],
                new_block_ids=[blocks for _, blocks, _ in again],
                num_computed_tokens=[num_computed for _, _, num_computed in again],
                resumed_req_ids=set(line.get("resumed", [])),
            ),
            preempted_req_ids=set(line.get("preempted", [])),
        )
        self.outputs.append(output)
        return output

    def update_from_output(self, output: SimpleNamespace, result: object) -> str:
        self._become("update")
        return "vLLM's own outputs"

    def finish_requests(self, request_ids: list[str], status: object) -> None:
        self._become("finish")

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        if reset_running_requests:
            self._become("reset")
            return True
        for block in self.pool.blocks:
            block.block_hash = None
        return True

    def set_pause_state(self, state: str) -> None:
        self._become("pause")
        self.pause_state = None if state == "UNPAUSED" else SimpleNamespace(name=state)

    def shutdown(self) -> None:
        """Does nothing: vLLM has nothing more to close."""

    def _become(self, call: str) -> dict[str, Any]:
        line = next(self._lines)
        assert line["call"] == call, f"the recording has {line['call']} where {call} was called"
        for name, state in line.get("requests", {}).items():
            self._all[name].become(state)
            if state[-1].startswith("FINISHED"):
                self.requests.pop(name, None)
        self.num_free = line.get("free", self.num_free)
        if "ended" in line:
            self.finished_req_ids = set(line["ended"])
        if "running" in line:
            self.running = [self._all[name] for name in line["running"]]
        for name in _QUEUES:
            if name in line:
                getattr(self, name).num_waiting = line[name]
        if "cadence" in line:
            vars(self).update(zip(_CADENCE, line["cadence"], strict=True))
        if "chunks" in line:
            for name, request in self._all.items():
                request.is_prefill_chunk = name in line["chunks"]
        if "queue" in line:
            self.waiting.held = [self._all[name] for name in line["queue"]]
        if call == "schedule" and hasattr(self, "deferred_waiting"):
            self.deferred_waiting.held = [self._all[name] for name in line.get("held", ())]
        if "groups" not in self.head:
            line = line | {"freed": self._freed_by(line)}
        for name, (num_tokens, tables) in line.get("loads", {}).items():
            self._loads[name] = tables
            self.kv_cache_manager.allocate_slots(
                self._all[name], num_external_computed_tokens=num_tokens, delay_cache_blocks=True
            )
        freed = [self.pool.blocks[abs(each)] for each in line.get("freed", [])]
        for block, each in zip(freed, line.get("freed", []), strict=True):
            block.block_hash = None if each > 0 else b"of its content"
        if freed:
            self.pool.free_blocks(iter(freed))
        for block in line.get("hashed", []):
            self.pool.blocks[block].block_hash = b"of its content"
        for block in line.get("unhashed", []):
            self.pool.blocks[block].block_hash = None
        return line

    def _freed_by(self, line: dict[str, Any]) -> list[int]:
        """Return what a recording with one group need not tell: the blocks of those that left."""
        statuses = {name: status for name, (*_, status) in line.get("requests", {}).items()}
        ends = ("FINISHED", "PREEMPTED") if line["call"] == "reset" else "FINISHED"
        gone = [name for name, status in statuses.items() if status.startswith(ends)]
        if line["call"] == "schedule":
            gone += line.get("preempted", [])
        freed = [block for name in gone for block in reversed(self._tables.pop(name, []))]
        for name, tables, *_ in line.get("new", []):
            self._tables[name] = [block for table in tables for block in table]
        for name, tables, _ in line.get("again", []):
            for table in tables or ():
                self._tables.setdefault(name, []).extend(table)
        return [-each if self.pool.blocks[each].block_hash else each for each in freed]

    # The test's side

    def play(self) -> Iterator[str]:
        """Make the recorded calls, and yield the name of each once it is done."""
        num_updated, worker = 0, InProcessWorker()
        for line in self.calls:
            match line["call"]:
                case "add":
                    self.add_request(PlayedRequest(line))
                case "schedule":
                    worker.execute(self.schedule())
                case "update":
                    said = self.update_from_output(self.outputs[num_updated], self.model_output)
                    assert said == "vLLM's own outputs"
                    num_updated += 1
                case "finish":
                    self.finish_requests(line["ids"], "FINISHED_ABORTED")
                case "reset":
                    self.reset_prefix_cache(reset_running_requests=True)
                case "pause":
                    self.set_pause_state(line["state"])
                case "budget":
                    self.max_num_scheduled_tokens = line["budget"]
                    next(self._lines)
            yield line["call"]
