"""SGLang's own scheduler on a CPU, one tensor-parallel rank, with a witness of what it does.

Run by `run_sglang.py` in SGLang's environment, as a script: `sglang_rank.py FOLDER RANK`. FOLDER
has `plan.json`; each rank leaves its notes there as `rankN.json`. The first rank feeds itself over
SGLang's sockets, as SGLang's tokenizer would. Modules that only a GPU or a server needs are empty.
"""

import importlib.machinery
import json
import pickle
import random
import sys
import threading
import time
from array import array
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import MagicMock

EMPTY = ("torchvision", "flashinfer", "sgl_kernel", "decord", "sentencepiece", "loguru", "vllm")
WAIT_S = 90.0


class EmptyModule(ModuleType):
    """A module that has every name, with nothing behind it."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class EmptyModules:
    """Finds the modules of `EMPTY`, for `sys.meta_path`."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name.partition(".")[0] not in EMPTY:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> ModuleType:
        return EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: the module is empty."""


class Witness:
    """Notes what SGLang does, independently of the plugin."""

    def __init__(self, scheduler_class: Any) -> None:
        self.steps: list[dict[str, int]] = []  # tokens of each request
        self.chunks: list[int] = []  # the chunk size in force
        self.pages: list[int] = []  # in use after each step
        self.retracted: list[str] = []
        self.ends: dict[str, tuple[str, int]] = {}  # reason and output tokens, as clients get them
        self._wrap(scheduler_class, "run_batch", self._note_batch, is_after=False)
        self._wrap(scheduler_class, "process_batch_result", self._note_pages, is_after=True)
        self._wrap(scheduler_class, "_add_request_to_queue", self._note_queued, is_after=False)

    def _wrap(self, owner: Any, name: str, note: Any, *, is_after: bool) -> None:
        method = getattr(owner, name)

        def witnessed(scheduler: Any, subject: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_after:
                note(scheduler, subject)
            result = method(scheduler, subject, *args, **kwargs)
            if is_after:
                note(scheduler, subject)
            return result

        setattr(owner, name, witnessed)

    def _note_batch(self, scheduler: Any, batch: Any) -> None:
        lens = [1] * len(batch.reqs) if batch.forward_mode.is_decode() else batch.extend_lens
        self.steps.append({req.rid: n for req, n in zip(batch.reqs, lens, strict=True)})
        self.chunks.append(scheduler.chunked_prefill_size)

    def _note_pages(self, scheduler: Any, batch: Any) -> None:
        num_tokens = scheduler.pool_stats_observer.get_pool_stats().full_num_used
        self.pages.append(-(-num_tokens // scheduler.page_size))

    def _note_queued(self, scheduler: Any, req: Any) -> None:
        if req.retraction_count:
            self.retracted.append(req.rid)


def feed(plan: dict[str, Any], folder: Path, ports: Any, witness: Witness) -> None:
    """Send the requests of the plan once `go` is there; end the loop when all have ended."""
    import zmq
    from sglang.srt.managers import io_struct

    context = zmq.Context.instance()
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    push.bind(ports.scheduler_input_ipc_name)
    pull.bind(ports.tokenizer_ipc_name)
    deadline_s = time.monotonic() + WAIT_S
    while not (folder / "go").exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    randomness = random.Random(1)
    shared = [randomness.randrange(100) for _ in range(40)]
    for i in range(plan["num_requests"]):
        prompt = [randomness.randrange(100) for _ in range(20 + i * 7 % 60)]
        request = generate_request(f"r{i}", (shared if i % 2 else []) + prompt, i)
        io_struct.sock_send(push, request)
        if i in plan["aborted"]:
            io_struct.sock_send(push, io_struct.AbortReq(rid=f"r{i}"))
        time.sleep(0.01)
    while len(witness.ends) < plan["num_requests"] and time.monotonic() < deadline_s:
        if pull.poll(200):
            note_ends(io_struct.sock_recv(pull), witness)
    io_struct.sock_send(push, io_struct.ShutdownReq())


def generate_request(name: str, prompt: list[int], i: int) -> Any:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    stops = list(range(0, 260, 9)) if i % 4 == 0 else None  # so that its end is not predictable
    sampling = SamplingParams(max_new_tokens=20 + i % 17 * 4, stop_token_ids=stops)
    sampling.normalize(None)
    left_out = ("input_text", "input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob")
    return TokenizedGenerateReqInput(
        rid=name,
        input_ids=array("q", prompt),
        sampling_params=sampling,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        stream=False,
        **dict.fromkeys(left_out),
    )


def note_ends(output: Any, witness: Witness) -> None:
    if type(output).__name__ == "AbortReq":
        witness.ends[output.rid] = ("abort", 0)
        return
    columns = zip(output.rids, output.finished_reasons, output.completion_tokens, strict=True)
    for rid, reason, num_tokens in columns:
        if reason is not None:
            witness.ends[rid] = (reason["type"], num_tokens)


def fail_after(num_steps: int) -> None:
    """Make the plugin raise an error."""
    from stepscope.engine.adapters.sglang.watcher import SglangWatcher

    processed, count = SglangWatcher.processed, iter(range(num_steps))

    def fail(*args: Any) -> Any:
        next(count)
        return processed(*args)

    SglangWatcher.processed = fail  # type: ignore[method-assign]


def port_args(server: Any, folder: Path, rank: int) -> Any:
    """The sockets of this server, which the first rank chooses."""
    from sglang.srt.server_args import PortArgs

    path = folder / "ports"
    if not rank:
        ports = PortArgs.init_new(server)
        (folder / "ports.part").write_bytes(pickle.dumps(ports))
        (folder / "ports.part").rename(path)
        return ports
    while not path.exists():
        time.sleep(0.05)
    return pickle.loads(path.read_bytes())


def main(folder: Path, rank: int) -> None:
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()  # caches that there is none
    sys.meta_path.append(EmptyModules())  # type: ignore[arg-type]
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
    from sglang.srt.server_args import ServerArgs

    plan = json.loads((folder / "plan.json").read_text())
    witness = Witness(Scheduler)
    load_plugins()
    if not rank and plan["fail_after"]:
        fail_after(plan["fail_after"])
    server = ServerArgs(**plan["options"])
    ports = port_args(server, folder, rank)
    publish(server, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=rank))
    if not rank:
        threading.Thread(target=feed, args=(plan, folder, ports, witness), daemon=True).start()
    scheduler = Scheduler(server, ports)
    scheduler.run_event_loop()
    notes = vars(witness) | {
        "chunk": scheduler.chunked_prefill_size,
        "seats": get_parallel().pp_max_micro_batch_size,
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(notes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
