"""The kernels of a GPU alone: attention by each backend, and the small operations of a layer.

    python tests/bench/bench_gpu_kernels.py [--json FILE] [--repeat 20] [--only decode chunk fused]

Two ceilings are measured first: a large copy within the device's memory, bytes read and written,
and a large product in bf16 on random numbers. Shares are of the first for decodes and the small
operations (the fewest bytes that have to move), of the second for chunks. SDPA gets dense keys and
values, nothing to gather. Calls go around copies of the keys and values that are together several
times the L2 cache, in a CUDA graph where a backend can be captured (no launch gaps), else one by
one. Medians of `--repeat` rounds. With `--device cpu`, shapes are tiny: it only shows that the
script runs.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from stepscope.engine.machine import describe_machine
from stepscope.kernels import fused
from stepscope.kernels.paged_attention import PagedBatch, available_backends, choose

BLOCK_SIZE = 16
# (query heads, KV heads, head dimension) of Qwen3-0.6B, and of Qwen3-8B and Llama-3.1-8B.
HEADS = ((16, 8, 128), (32, 8, 128))
DECODES = [(batch, context) for context in (512, 4096) for batch in (1, 8, 32, 128, 256)]
# (tokens before, tokens in it) of each request.
CHUNKS = (
    ((0, 512),),
    ((0, 2048),),
    ((0, 8192),),
    ((14336, 2048),),
    ((0, 300), (100, 500), (3000, 1200)),
)
MIXED = (*((4096, 1),) * 64, (2048, 1984))
HIDDEN, INNER = 4096, 14336
FUSED_TOKENS = (1, 64, 256, 2048)
ROTATION_BYTES = 512 << 20  # several times the L2 of an H200
MOST_COPIES = 128

Run = Callable[[], object]


class Line(NamedTuple):
    what: str
    contender: str
    microseconds: float
    share: float  # of the ceiling that bounds it


class Bench:
    def __init__(self, device: str, repeat: int) -> None:
        self.device = torch.device(device)
        self.on_gpu = self.device.type == "cuda"
        self.repeat = repeat
        self.dtype = torch.bfloat16
        self.lines: list[Line] = []
        self.bytes_per_s = self._copy_rate((4 << 30) if self.on_gpu else 1 << 20)
        self.flops_per_s = self._product_rate(8192 if self.on_gpu else 256)

    def _copy_rate(self, size: int) -> float:
        source = torch.randint(0, 100, (size,), dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        return 2 * size / self.microseconds([lambda: target.copy_(source)], False) * 1e6

    def _product_rate(self, side: int) -> float:
        a, b = torch.randn(2, side, side, device=self.device).to(self.dtype)
        return 2 * side**3 / self.microseconds([lambda: a @ b], False) * 1e6

    def microseconds(self, runs: list[Run], can_capture: bool) -> float:
        """Of one run: the median over rounds of all of them, one after the other."""
        with torch.inference_mode():
            for run in runs:
                run()
            once = self._captured(runs) if can_capture and self.on_gpu else runs
            times = []
            for _ in range(self.repeat):
                times.append(self._round(once) / len(runs))
        return statistics.median(times)

    def _captured(self, runs: list[Run]) -> list[Run]:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for run in runs:
                run()
        return [graph.replay]

    def _round(self, runs: list[Run]) -> float:
        if not self.on_gpu:
            start = time.perf_counter()
            for run in runs:
                run()
            return (time.perf_counter() - start) * 1e6
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        for run in runs:
            run()
        events[1].record()
        events[1].synchronize()
        return float(events[0].elapsed_time(events[1])) * 1e3

    def note(self, what: str, contender: str, microseconds: float, share: float) -> None:
        self.lines.append(Line(what, contender, microseconds, share))
        print(
            f"{what:<44} {contender:<14} {microseconds:>10.1f} us {100 * share:>6.1f} %", flush=True
        )

    def attention(
        self, what: str, heads: tuple[int, int, int], lengths: tuple[tuple[int, int], ...]
    ) -> None:
        """All backends on one step, and SDPA where the step is one that it can be given."""
        num_heads, num_kv_heads, head_dim = heads
        contexts = np.array([before + new for before, new in lengths])
        counts = np.array([new for _, new in lengths])
        is_decode = bool((counts == 1).all())
        kv_bytes = int(contexts.sum()) * 2 * num_kv_heads * head_dim * self.dtype.itemsize
        pairs = sum(new * before + new * (new + 1) // 2 for before, new in lengths)
        flops = 4 * pairs * num_heads * head_dim
        floor_us = max(kv_bytes / self.bytes_per_s, flops / self.flops_per_s) * 1e6
        copies = max(1, min(MOST_COPIES, ROTATION_BYTES // kv_bytes)) if self.on_gpu else 1
        width = -(-int(contexts.max()) // BLOCK_SIZE)
        shape = (len(lengths) * width, BLOCK_SIZE, num_kv_heads, head_dim)
        query = torch.randn(int(counts.sum()), num_heads, head_dim, device=self.device)
        query = query.to(self.dtype)
        caches = [
            torch.randn(2, *shape, device=self.device, dtype=self.dtype) for _ in range(copies)
        ]
        tables = np.random.default_rng(0).permutation(shape[0]).reshape(len(lengths), width)
        for each in available_backends(str(self.device), self.dtype):
            if not each.usable or each.name == "reference":
                continue
            backend = choose(each.name, str(self.device), self.dtype).backend
            batch = PagedBatch(
                query_starts=np.concatenate([[0], np.cumsum(counts)]),
                context_lens=contexts,
                block_tables=tables,
                slot_mapping=torch.zeros(len(query), dtype=torch.int64, device=self.device),
                block_size=BLOCK_SIZE,
                device=self.device,
            )
            attend = partial(backend, query, batch=batch, scale=head_dim**-0.5)
            runs: list[Run] = [
                partial(attend, key_cache=keys, value_cache=values) for keys, values in caches
            ]
            taken = self.microseconds(runs, is_decode and backend.is_capturable)
            self.note(what, each.name, taken, floor_us / taken)
        if len(set(lengths)) == 1 and (is_decode or lengths[0][0] == 0):
            taken = self.microseconds(
                self._sdpa(heads, len(lengths), int(contexts[0]), is_decode, copies), True
            )
            self.note(what, "SDPA, dense", taken, floor_us / taken)

    def _sdpa(
        self, heads: tuple[int, int, int], batch: int, context: int, is_decode: bool, copies: int
    ) -> list[Run]:
        num_heads, num_kv_heads, head_dim = heads
        queries = 1 if is_decode else context
        shape = (batch, num_kv_heads, context, head_dim)
        query = torch.randn(batch, num_heads, queries, head_dim, device=self.device)
        query = query.to(self.dtype)
        dense = [
            torch.randn(2, *shape, device=self.device, dtype=self.dtype) for _ in range(copies)
        ]
        attend = partial(F.scaled_dot_product_attention, is_causal=not is_decode, enable_gqa=True)
        return [partial(attend, query, keys, values) for keys, values in dense]

    def fused(self, num_tokens: int) -> None:
        """The operations between products, of a layer of an 8B model, and plain torch's."""
        heads, kv_heads, head_dim = HEADS[1]
        width = (heads + 2 * kv_heads) * head_dim

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=self.device, dtype=self.dtype)

        x, residual, weight = random(num_tokens, HIDDEN), random(num_tokens, HIDDEN), random(HIDDEN)
        gate_up, qkv = random(num_tokens, 2 * INNER), random(num_tokens, width)
        norms = random(head_dim), random(head_dim)
        rope = torch.randn(num_tokens, head_dim, device=self.device)
        positions = torch.arange(num_tokens, device=self.device)
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        caches = (
            random(num_blocks, BLOCK_SIZE, kv_heads, head_dim),
            random(num_blocks, BLOCK_SIZE, kv_heads, head_dim),
        )
        store = (qkv, rope, positions, positions, *caches, heads, kv_heads, *norms, 1e-6)
        operations: list[tuple[str, int, Run, Run]] = [
            (
                "add + RMSNorm",
                4 * x.nbytes,
                lambda: fused.add_rms_norm(x, residual, weight, 1e-6),
                lambda: fused.torch_add_rms_norm(x, residual, weight, 1e-6),
            ),
            (
                "q/k norm, RoPE, store",
                2 * qkv.nbytes + rope.nbytes,
                lambda: fused.norm_rope_store(*store),
                lambda: fused.torch_norm_rope_store(*store),
            ),
            (
                "SiLU * mul",
                3 * gate_up.nbytes // 2,
                lambda: fused.silu_mul(gate_up),
                lambda: fused.torch_silu_mul(gate_up),
            ),
        ]
        for name, moved, ours, plain in operations:
            for contender, run in (("ours", ours), ("plain torch", plain)):
                taken = self.microseconds([run] * 20, True)
                share = moved / self.bytes_per_s * 1e6 / taken
                self.note(f"{name}, {num_tokens} tokens", contender, taken, share)


def steps(bench: Bench, kinds: list[str]) -> Iterator[tuple[str, tuple[tuple[int, int], ...]]]:
    shrink = 1 if bench.on_gpu else 64
    if "decode" in kinds:
        for batch, context in DECODES:
            yield (
                f"decode, {batch} x {context} tokens",
                ((max(1, context // shrink), 1),) * max(1, batch // shrink),
            )
    if "chunk" in kinds:
        for lengths in CHUNKS:
            chunks = ", ".join(f"{new} after {before}" for before, new in lengths)
            yield f"chunk, {chunks}", tuple((b // shrink, max(2, n // shrink)) for b, n in lengths)
        yield (
            "mixed, 64 x 4096 and 1984 after 2048",
            tuple((b // shrink, n if n == 1 else n // shrink) for b, n in MIXED),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--only", nargs="+", default=["decode", "chunk", "fused"], metavar="decode|chunk|fused"
    )
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no GPU: nothing to measure (--device cpu tries the script itself)")
        return
    torch.manual_seed(0)
    bench = Bench(options.device, options.repeat)
    name = torch.cuda.get_device_name() if bench.on_gpu else "this CPU, tiny shapes: no measurement"
    print(
        f"{name}; copy {bench.bytes_per_s / 1e12:.2f} TB/s, "
        f"bf16 product {bench.flops_per_s / 1e12:.0f} TFLOP/s"
    )
    for heads in HEADS:
        for what, lengths in steps(bench, options.only):
            bench.attention(f"{heads[0]} heads: {what}", heads, lengths)
    if "fused" in options.only:
        for num_tokens in FUSED_TOKENS if bench.on_gpu else (3,):
            bench.fused(num_tokens)
    if options.json is not None:
        result = {
            "device": name,
            "machine": json.loads(json.dumps(describe_machine(), default=_fields)),
            "copy_bytes_per_s": bench.bytes_per_s,
            "bf16_flops_per_s": bench.flops_per_s,
            "lines": [line._asdict() for line in bench.lines],
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _fields(struct: object) -> dict[str, object]:
    return {name: getattr(struct, name) for name in getattr(struct, "__struct_fields__", ())}


if __name__ == "__main__":
    main()
