"""Runs Triton kernels for tests in a process of its own: `triton_worker.py MODE`.

Triton decides when it is imported whether kernels are interpreted, so a test process, which may
have imported it already, cannot. MODE is

- interpreted: on CPU tensors, by Triton's interpreter (TRITON_INTERPRET=1 is set by the caller);
- cuda: on a GPU;
- compiled: compiled for an H200 and never launched, which needs no GPU.

Reads one request a line, `{"case": NAME, ...}`, and answers each with a line: what the case
returned, or `{"raised": TRACEBACK}`.
"""

import json
import math
import re
import subprocess
import sys
import tempfile
import traceback
import warnings
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from msgspec import structs
from test_kernels import Case, make_case

from stepscope.engine.protocol.engine_config import EngineConfig
from stepscope.engine.protocol.knobs import Limits
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.step import ScheduledStep
from stepscope.kernels.dispatch import fused
from stepscope.kernels.paged_attention import AttentionOptions, BatchTensors, LayerCache, QKVHeads
from stepscope.kernels.reference import ReferenceAttention
from stepscope.kernels.triton import attention as triton_attention
from stepscope.kernels.triton import combine as triton_combine
from stepscope.kernels.triton import fused as triton_fused
from stepscope.kernels.triton.attention import TritonAttention
from stepscope.kernels.triton.one_row import TILES, one_row
from stepscope.kernels.triton.plan import Device

MODE = sys.argv[1] if len(sys.argv) > 1 else "interpreted"
DEVICE = torch.device("cuda" if MODE == "cuda" else "cpu")
H200 = Device(num_sms=132, shared_bytes=227 << 10)


def backend(num_sms: int) -> TritonAttention:
    if MODE == "compiled":
        return TritonAttention(H200)
    return TritonAttention(Device.of(DEVICE)._replace(num_sms=num_sms))


def build(request: dict[str, Any]) -> tuple[Case, AttentionOptions]:
    """The step of a request, in its dtype and on the device, and the options of attention."""
    num_heads = request.get("num_heads", 4)
    case = make_case(
        [tuple(pair) for pair in request["lengths"]],
        block_size=request.get("block_size", 16),
        num_heads=num_heads,
        num_kv_heads=request.get("num_kv_heads", 2),
        head_dim=request.get("head_dim", 16),
        seed=request.get("seed", 0),
        device=DEVICE.type,
    )
    dtype = getattr(torch, request.get("dtype", "float32"))
    cache_dtype = getattr(torch, request.get("cache_dtype", request.get("dtype", "float32")))
    options = AttentionOptions(
        request.get("scale", 0.7),
        request.get("window"),
        request.get("softcap"),
        torch.linspace(-2, 3, num_heads, device=DEVICE) if request.get("sinks") else None,
    )
    return case.to(dtype, cache_dtype), options


def attention(request: dict[str, Any]) -> dict[str, Any]:
    """The largest error against the reference, over the largest value of the cache."""
    case, options = build(request)
    query = case.query
    if request.get("by_head"):  # as transformers hands them over
        query = query.transpose(0, 1).contiguous().transpose(0, 1)
    chosen = backend(request.get("num_sms", 4))
    wide = case.to(torch.float32)
    wide = wide._replace(cache=LayerCache(*(each.clone() for each in wide.cache[:2])))
    if request.get("garbage"):  # slots that hold no token of a request
        used = torch.zeros(case.cache.keys.shape[:2], dtype=torch.bool)
        size = case.batch.block_size
        for table, length in zip(case.batch.block_tables, case.batch.context_lens, strict=True):
            for position in range(length):
                used[table[position // size], position % size] = True
        for cache in case.cache[:2]:
            cache[~used.to(DEVICE)] = math.nan
    found = chosen(query, *case[1:], options)
    expected = ReferenceAttention()(*wide, options)
    again = found
    if request.get("twice"):  # as in the next layer
        again = chosen(query, *case[1:], options)
    launches = [each for plan in case.batch.plans.values() for each in plan]  # type: ignore[attr-defined]
    return {
        "error": float((found.float() - expected).abs().max() / wide.cache.values.abs().max()),
        "same_again": torch.equal(found, again),
        "dtype": str(found.dtype).removeprefix("torch."),
        "splits": [launch.num_splits for launch in launches],
    }


def padded(request: dict[str, Any]) -> dict[str, Any]:
    """A launch planned for more requests and longer contexts than the step has."""
    lengths = request["lengths"]
    case, options = build(request)
    planned, _ = build(request | {"lengths": [[4000, 1]] * request["planned"]})
    _, contexts, tables = case.batch.on_device()
    room = BatchTensors(*planned.batch.on_device())
    room.context_lens.zero_()
    room.block_tables.zero_()
    room.context_lens[: len(lengths)] = contexts
    room.block_tables[: len(lengths), : tables.shape[1]] = tables
    batch = replace(planned.batch, tensors=room, plans={})
    query = torch.randn(request["planned"], *case.query.shape[1:], device=DEVICE)
    query[: len(lengths)] = case.query
    found = backend(request.get("num_sms", 4))(query, case.cache, batch, options)
    expected = ReferenceAttention()(*case, options)
    launches = [each for plan in batch.plans.values() for each in plan]  # type: ignore[attr-defined]
    return {
        "error": float((found[: len(lengths)] - expected).abs().max()),
        "padding": float(found[len(lengths) :].abs().max()),
        "splits": [launch.num_splits for launch in launches],
    }


def norms_and_rope(request: dict[str, Any]) -> dict[str, Any]:
    tokens, heads, kv_heads, dim = (request[k] for k in ("tokens", "heads", "kv_heads", "head_dim"))
    dtype = getattr(torch, request["dtype"])
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=generator).to(DEVICE, dtype)
    rope = torch.randn(50, dim, generator=generator).to(DEVICE)
    positions = torch.randint(0, 50, (tokens,), generator=generator).to(DEVICE)
    slots = torch.randperm(32, generator=generator)[:tokens].to(DEVICE)
    norms = [
        torch.randn(dim, generator=generator).to(DEVICE, dtype)
        if name in request["norms"]
        else None
        for name in "qk"
    ]
    ours, theirs = (
        [torch.zeros(2, 16, kv_heads, dim, dtype=dtype, device=DEVICE) for _ in range(2)]
        for _ in range(2)
    )
    split = QKVHeads(heads, kv_heads, *norms, 1e-6)
    found = triton_fused.norm_rope_store(qkv, rope, positions, slots, LayerCache(*ours), split)
    expected = fused.torch_norm_rope_store(qkv, rope, positions, slots, LayerCache(*theirs), split)
    return {
        "query": relative(found, expected),
        "keys": relative(ours[0], theirs[0]),
        "values_equal": torch.equal(ours[1], theirs[1]),
    }


def add_and_norm(request: dict[str, Any]) -> dict[str, Any]:
    dtype = getattr(torch, request["dtype"])
    rows, size = request["rows"], request["size"]
    generator = torch.Generator().manual_seed(2)
    x, residual = torch.randn(2, rows, size, generator=generator).to(DEVICE, dtype)
    weight = torch.randn(size, generator=generator).to(DEVICE, dtype)
    before = residual.clone() if request["residual"] else None
    after = residual if request["residual"] else None
    found, stream = triton_fused.add_rms_norm(x, after, weight, 1e-5)
    expected, expected_stream = fused.torch_add_rms_norm(x, before, weight, 1e-5)
    return {
        "output": relative(found, expected),
        "residual": relative(stream, expected_stream),
        "in_place": stream is (x if after is None else after),
    }


def gate(request: dict[str, Any]) -> dict[str, Any]:
    dtype = getattr(torch, request["dtype"])
    generator = torch.Generator().manual_seed(3)
    gate_up = 4 * torch.randn(request["rows"], 2 * request["size"], generator=generator)
    gate_up = gate_up.to(DEVICE, dtype)
    return {"output": relative(triton_fused.silu_mul(gate_up), fused.torch_silu_mul(gate_up))}


def row(request: dict[str, Any]) -> dict[str, Any]:
    """The product of one row, in each tile, and the same with a NaN and an infinity in it."""
    dtype = getattr(torch, request["dtype"])
    outputs, size, is_gated = request["outputs"], request["size"], request["gated"]
    num_rows = 2 * outputs if is_gated else outputs
    generator = torch.Generator().manual_seed(5)
    x, weight = (
        (torch.randn(rows, size, generator=generator) * size**-0.25).to(DEVICE, dtype)
        for rows in (1, num_rows)
    )
    bias = torch.randn(num_rows, generator=generator).to(DEVICE, dtype)
    bias = bias if request["bias"] else None
    expected = exact_row(x, weight, bias, is_gated)
    errors, passes_on = [], True
    for tile in TILES:
        errors.append(relative(one_row(x, weight, bias, tile, is_gated=is_gated), expected))
        broken = weight.clone()
        broken[0, size - 1], broken[1, 0] = math.nan, math.inf
        found = one_row(x, broken, bias, tile, is_gated=is_gated)
        passes_on &= torch.equal(found.isfinite(), exact_row(x, broken, bias, is_gated).isfinite())
    return {"errors": errors, "passes_on": passes_on}


def exact_row(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_gated: bool
) -> torch.Tensor:
    product = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    rounded = product.to(x.dtype)
    return fused.torch_silu_mul(rounded) if is_gated else rounded


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error, in units of the rounding of the largest value in its dtype."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return math.inf
    step = float(expected.abs().max()) * torch.finfo(expected.dtype).eps
    return float((found.float() - expected.float()).abs().max()) / step


def compiled(request: dict[str, Any]) -> dict[str, Any]:
    """The compiler's output for the kernels that a step launches."""
    case, options = build(request)
    COMPILED.clear()
    backend(0)(*case, options)
    if request.get("fused"):
        norms_and_rope(request)
        add_and_norm(request)
        gate(request)
    return {
        "kernels": [
            {
                "name": kernel.metadata.name,
                "shared": kernel.metadata.shared,
                "wgmma": "wgmma.mma_async" in kernel.asm["ptx"],
                "async_copies": kernel.asm["ptx"].count("cp.async.cg"),
            }
            for kernel in COMPILED
        ]
    }


def row_compiled(request: dict[str, Any]) -> dict[str, Any]:
    """What became of the kernel for one row, in each tile."""
    from triton import knobs

    dump = [str(knobs.nvidia.cuobjdump.path), "--dump-resource-usage"]
    num_rows, size = request["outputs"] * (1 + request["gated"]), request["size"]
    x, weight = (torch.empty(n, size, dtype=torch.bfloat16) for n in (1, num_rows))
    kernels = []
    for tile in TILES:
        COMPILED.clear()
        one_row(x, weight, None, tile, is_gated=request["gated"])
        (kernel,) = COMPILED
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            usage = subprocess.run([*dump, file.name], capture_output=True, text=True, check=True)
        numbers = dict(re.findall(r"(REG|STACK):(\d+)", usage.stdout))
        rows = max(2, tile.rows) if request["gated"] else tile.rows
        kernels.append(
            {
                "loads": re.findall(r"(?:ld\.global|cp\.async\.c[ag])\..*", kernel.asm["ptx"]),
                "registers": int(numbers["REG"]),
                "stack": int(numbers["STACK"]),
                "shared": kernel.metadata.shared,
                "num_warps": tile.num_warps,
                # Of the weight, that a program has asked for before it adds up.
                "bytes": 16 * 32 * tile.num_warps * rows * tile.depth * max(1, tile.num_stages - 1),
            }
        )
    return {"kernels": kernels}


def variants(request: dict[str, Any]) -> dict[str, Any]:
    """The kernels that a step launches, by the key of Triton's cache; none is compiled."""
    from triton import knobs

    found = []

    def note(key: str, fn: Any, **rest: object) -> bool:
        found.append(f"{fn.name} {key}")
        return True  # as if another process had compiled it

    case, options = build(request)
    for kernel in (triton_attention._attend, triton_combine._combine):
        kernel.device_caches.clear()  # of what other cases compiled
    knobs.runtime.jit_cache_hook = note
    try:
        backend(0)(*case, options)
    finally:
        knobs.runtime.jit_cache_hook = None
    return {"kernels": found}


def engine(request: dict[str, Any]) -> dict[str, Any]:
    """A model started and run on a GPU, and its tokens for the same prompts on a CPU."""
    # Here, not above: the other cases need no transformers, and importing it takes seconds.
    from stepscope.engine.execution.loading import load_runner, prepare
    from tests.support.engines.relaunching import RelaunchingDevice

    config = EngineConfig(
        model=request["folder"],
        dtype="float32",
        device="cpu",
        threads=1,
        max_model_len=16,
        block_size=4,
        seq_capacity=16,  # as in a default engine, more than a short prompt has tokens
        token_capacity=16,
        kv_memory="1MB",
    )
    told: list[str] = []

    def tell(what: str, share: float) -> None:
        told.append(what)

    ours = load_runner(config, tell)
    expected, _ = serve(ours)
    told.clear()
    if MODE == "cuda":
        ours = load_runner(structs.replace(config, device="cuda", kv_memory="auto"), tell)
        found, shapes = serve(ours)
        ahead, num_ahead = pipelined(ours)
    else:
        ours.backend = TritonAttention(Device.of(DEVICE))
        with mock.patch.object(fused, "_kernels_for", return_value=triton_fused):
            prepare(ours, config, tell, RelaunchingDevice())
            found, shapes = serve(ours)
            ahead, num_ahead = pipelined(ours)
    return {
        "found": found,
        "expected": expected,
        "shapes": shapes,
        "ahead": ahead,
        "num_ahead": num_ahead,
        "told": list(dict.fromkeys(told)),
        "implementation": ours.description["implementation"],
        "attention": ours.description["attention_backend"],
    }


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, 250, (n,), generator=generator).tolist() for n in (5, 3, 6)]


def pipelined(runner: Any) -> tuple[list[list[int]], int]:
    """Output tokens of the same requests with overlap, and the number of steps launched ahead."""
    from stepscope.engine.execution.runner import ModelRunner
    from tests.support.engines.whole_core import WholeCore

    limits = Limits(max_num_batched_tokens=16, max_num_seqs=4, max_model_len=16)
    knobs = {"max_num_batched_tokens": 16}
    engine = WholeCore(limits, runner, runner.num_blocks, 4, knobs, overlap=True)
    launched: list[ScheduledStep] = []

    def launch(step: ScheduledStep) -> Any:
        launched.append(step)
        return ModelRunner.launch(runner, step)

    with mock.patch.object(runner, "launch", launch):
        clients = [engine.submit(prompt, max_tokens=3, ignore_eos=True) for prompt in prompts()]
        engine.run()
    outputs = [client.tokens for client in clients]
    return outputs, sum(step.after is not None for step in launched)


def serve(runner: Any) -> tuple[list[list[int]], list[tuple[int, str | None]]]:
    """Output tokens of two requests and, a step later, a third; padding and graph of each step."""
    from tests.support.engines.tiny_runner import next_row, run_rows

    blocks = list(range(runner.num_blocks))[::-1]
    requests = []
    for i, prompt in enumerate(prompts()):
        requests.append(Request(i, prompt, SamplingParams(), arrival_ns=0))
        requests[-1].block_table = [blocks.pop() for _ in range(3)]
    shapes = []
    for now in range(4):
        live = [each for each in requests[: now + 2] if each.num_output_tokens < 3]
        result = run_rows(runner, [next_row(each, each.num_tokens) for each in live])
        shapes.append((result.num_padded_tokens, result.cuda_graph))
    return [each.output_token_ids for each in requests], shapes


COMPILED: list[Any] = []
CASES = {
    each.__name__: each
    for each in (
        attention,
        padded,
        norms_and_rope,
        add_and_norm,
        gate,
        row,
        compiled,
        row_compiled,
        variants,
        engine,
    )
}


def compile_only() -> None:
    """Make every launch end where the compiled kernel would be handed to a GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class H200Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    run = JITFunction.run

    def compile_kernel(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel is not None:
            COMPILED.append(kernel)

    driver.set_active(H200Driver())
    JITFunction.run = compile_kernel


def main() -> None:
    warnings.simplefilter("ignore")  # of NumPy, on infinities in the interpreter
    if MODE == "compiled":
        compile_only()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = CASES[request["case"]](request)
        except Exception:  # noqa: BLE001 - the test shows it
            answer = {"raised": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
