"""The Triton kernels equal their references, and compile for the GPU they are meant for.

They run in a process of their own (`triton_worker.py`): on a GPU where there is one, interpreted
everywhere else.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stepscope.kernels.triton.plan import warm_up_steps

Ask = Callable[..., dict[str, Any]]

WORKER = Path(__file__).with_name("triton_worker.py")

MIXED = [[50, 1], [0, 33], [17, 1], [90, 5], [3, 1], [1, 2]]
EDGES = [[15, 1], [63, 1], [0, 1], [64, 1], [0, 16], [48, 16], [62, 66], [5, 0]]
LONG = [[600, 1], [3, 1], [300, 3], [560, 20]]

# Largest error over the largest value. In fp32 a GPU's exp2 is good to 22 bits. In half precision a
# weight and the result are rounded, to 8 and 11 bits; the interpreter cuts bf16 off where a GPU
# rounds to nearest.
ERRORS = {"float32": 1e-5, "bfloat16": 2**-7, "float16": 2**-10}


@contextlib.contextmanager
def worker(mode: str, cache: Path) -> Iterator[Ask]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)  # it takes cases from other test files
    if mode == "interpreted":
        environment["TRITON_INTERPRET"] = "1"
    command, pipe = [sys.executable, str(WORKER), mode], subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def ask(case: str, **request: object) -> dict[str, Any]:
        process.stdin.write(json.dumps({"case": case, **request}) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        assert line, f"the worker ended with {process.wait()}"
        answer: dict[str, Any] = json.loads(line)
        assert "raised" not in answer, answer["raised"]
        return answer

    try:
        yield ask
    finally:
        process.kill()  # it has answered everything and has nothing to clean up
        process.wait()
        process.stdin.close()
        process.stdout.close()


# A GPU's machine has the Triton of its torch, and not every one of them can interpret.
MODE = "cuda" if torch.cuda.is_available() else "interpreted"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    with worker(MODE, tmp_path_factory.mktemp("triton")) as ask:
        yield ask


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    with worker("compiled", tmp_path_factory.mktemp("triton")) as ask:
        yield ask


@pytest.mark.parametrize("lengths", [MIXED, EDGES], ids=["mixed", "edges"])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 1}, {"window": 9, "softcap": 2.0, "sinks": True}],
    ids=lambda options: "-".join(options) or "plain",
)
def test_triton_attention_equals_the_reference(
    run: Ask, lengths: list[list[int]], options: dict[str, object]
) -> None:
    answer = run("attention", lengths=lengths, num_kv_heads=1, **options)
    assert answer["error"] < ERRORS["float32"]


@pytest.mark.parametrize(
    "options", [{}, {"window": 400, "softcap": 5.0, "sinks": True}], ids=["plain", "all"]
)
def test_triton_attention_splits_long_contexts_and_combines_the_parts(
    run: Ask, options: dict[str, object]
) -> None:
    answer = run("attention", lengths=LONG, num_sms=8, num_kv_heads=1, num_heads=2, **options)
    assert answer["error"] < ERRORS["float32"]
    assert min(answer["splits"]) > 1


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(1, 1, 16, 1), (7, 1, 33, 3), (6, 2, 80, 16), (20, 1, 8, 32), (40, 1, 64, 16)],
)
def test_triton_attention_supports_any_groups_head_dimensions_and_block_sizes(
    run: Ask, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    answer = run(
        "attention",
        lengths=[[50, 1], [0, 20], [70, 3]],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        scale=0.2,
    )
    assert answer["error"] < ERRORS["float32"]


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "float8_e4m3fn")],
)
def test_half_precision_differs_from_the_reference_by_its_rounding_only(
    run: Ask, dtype: str, cache_dtype: str
) -> None:
    answer = run(
        "attention",
        lengths=[[50, 1], [0, 20], [70, 3]],
        dtype=dtype,
        cache_dtype=cache_dtype,
        head_dim=64,
        scale=0.125,
    )
    assert answer["dtype"] == dtype
    assert answer["error"] < ERRORS[dtype]


def test_triton_reads_no_slot_without_a_token_and_accepts_queries_by_head(run: Ask) -> None:
    lengths = [[50, 1], [90, 5], [3, 1], [0, 20]]
    answer = run("attention", lengths=lengths, garbage=True, by_head=True, twice=True)
    assert answer["error"] < ERRORS["float32"]
    assert answer["same_again"]


@pytest.mark.parametrize("num_sms", [1, 64], ids=["whole", "split"])
def test_a_kernel_launch_planned_for_a_larger_step_serves_a_smaller_one(
    run: Ask, num_sms: int
) -> None:
    """As in a CUDA graph: the launch is planned once, for the largest step."""
    answer = run(
        "padded", lengths=[[600, 1], [0, 1], [37, 1]], planned=6, num_sms=num_sms, sinks=True
    )
    assert answer["error"] < 5e-5
    assert answer["padding"] == 0
    assert (answer["splits"] == [1]) == (num_sms == 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "norms"),
    [(4, 2, 16, "qk"), (14, 2, 64, ""), (3, 1, 80, "qk"), (9, 8, 128, "q")],
)
def test_norms_rope_and_store_equal_plain_torch(
    run: Ask, heads: int, kv_heads: int, head_dim: int, norms: str, dtype: str
) -> None:
    answer = run(
        "norms_and_rope",
        tokens=3,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norms=norms,
        dtype=dtype,
    )
    assert answer["query"] <= 4
    assert answer["keys"] <= 4
    assert answer["values_equal"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "size"), [(3, 64), (2, 576), (1, 5120), (0, 64)])
def test_the_norm_with_residual_addition_equals_plain_torch(
    run: Ask, rows: int, size: int, dtype: str
) -> None:
    for residual in (True, False) if rows else ():
        answer = run("add_and_norm", rows=rows, size=size, dtype=dtype, residual=residual)
        assert answer["output"] <= 4
        assert answer["residual"] <= 1
        assert answer["in_place"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_gated_silu_equals_plain_torch(run: Ask, dtype: str) -> None:
    assert run("gate", rows=3, size=1100, dtype=dtype)["output"] <= 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("outputs", "size", "gated", "bias"),
    [(7, 4096, False, True), (5, 515, False, False), (3, 4096, True, False), (5, 77, True, True)],
)
def test_the_product_of_one_row_differs_from_the_exact_one_by_its_rounding_only(
    run: Ask, outputs: int, size: int, gated: bool, bias: bool, dtype: str
) -> None:
    answer = run("row", outputs=outputs, size=size, gated=gated, bias=bias, dtype=dtype)
    assert max(answer["errors"]) <= (4 if gated else 1)
    assert answer["passes_on"]


def test_an_engine_on_a_gpu_gives_the_tokens_of_one_on_a_cpu(
    run: Ask, tiny_checkpoint: Callable[..., Path]
) -> None:
    """Trial, pool, kernels, graphs, then requests.

    Where there is no GPU, every part but the hardware: kernels are interpreted, and what was
    recorded as a graph is launched again.
    """
    answer = run("engine", folder=str(tiny_checkpoint("qwen3")))
    assert answer["found"] == answer["expected"]
    assert answer["attention"] == "triton"
    assert answer["implementation"].endswith(
        "CUDA graphs up to 16 requests, in pieces up to 16 tokens"
    )
    # Steps of 8 tokens with a prompt are filled up to 16; three decodes up to four.
    assert answer["shapes"] == [[8, "piecewise"], [8, "piecewise"], [1, "full"], [0, "full"]]
    # Steps upon a step in flight take its tokens on the device, in graphs and out of them.
    assert answer["ahead"] == answer["expected"]
    assert answer["num_ahead"] == 2
    assert answer["told"][-5:] == [
        "a trial of the largest step",
        "allocating the KV cache",
        "compiling kernels",
        "recording CUDA graphs",
        "ready",
    ]


LLAMA_8B = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}


def test_every_kernel_compiles_for_an_h200_within_its_shared_memory(compiled: Ask) -> None:
    """And with the intended instructions: asynchronous copies for decode, `wgmma` for prefill."""
    decode, combine, prefill, _, *fused = compiled(
        "compiled",
        lengths=[[6000, 1], [6000, 200]],
        **LLAMA_8B,
        window=5000,
        softcap=50.0,
        sinks=True,
        fused=True,
        rows=4,
        size=5120,
        residual=True,
        tokens=3,
        heads=28,
        kv_heads=4,
        norms="qk",
    )["kernels"]
    assert [decode["name"], combine["name"], prefill["name"]] == ["_attend", "_combine", "_attend"]
    assert {each["name"] for each in fused} == {"_norm_rope_store", "_add_rms_norm", "_silu_mul"}
    assert decode["async_copies"]
    assert decode["shared"] <= (227 << 10) // 2
    assert prefill["wgmma"]
    assert prefill["shared"] <= 227 << 10


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_the_kernel_for_one_row_keeps_enough_of_the_weight_in_flight(
    compiled: Ask, gated: bool
) -> None:
    """In loads of 16 bytes, from as many programs as a multiprocessor of an H200 has room for."""
    for each in compiled("row_compiled", outputs=12288, size=4096, gated=gated)["kernels"]:
        for load in each["loads"]:
            assert "v4.b32" in load or "v2.b64" in load or load.startswith("cp.async.cg"), load
        assert each["loads"]
        assert each["stack"] <= 8  # an address; no part of the weight is spilled
        threads = 32 * each["num_warps"]
        registers = -(-each["registers"] // 8) * 8
        num_programs = min(
            65536 // (registers * threads),
            2048 // threads,
            32,
            (227 << 10) // (each["shared"] + 1024),
        )
        assert num_programs * each["bytes"] >= 64 << 10


def test_after_warm_up_steps_of_other_sizes_compile_no_new_kernel(compiled: Ask) -> None:
    """Compiling a kernel while requests run would hold all of them up for seconds."""
    known: set[str] = set()
    for pair in warm_up_steps(8192):
        known.update(compiled("variants", lengths=[pair], **LLAMA_8B)["kernels"])
    # Decodes, smaller and larger chunks, each whole and split, and two ways of adding up.
    assert len(known) == 3 * 2 + 2
    for lengths in (
        [[n, 1] for n in range(7)],
        [[30 * n, 1] for n in range(16)],
        [[2000, 1], [5, 1], [0, 333], [77, 5]],
        [[0, 15]] * 3,
        [[4000, 160], [0, 2]],
        [[0, 2000]],
        [[0, 1]],
    ):
        assert set(compiled("variants", lengths=lengths, **LLAMA_8B)["kernels"]) <= known
