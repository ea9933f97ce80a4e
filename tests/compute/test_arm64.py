"""Attention compiled for arm64 (NEON) and run on an emulated processor equals the reference."""

import ctypes
import importlib.util
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stepscope.kernels.cpu import library as cpu_library
from stepscope.kernels.cpu.attention import CpuAttention
from stepscope.kernels.cpu.library import ATTENTION, CACHES, STEP, CpuLibrary
from stepscope.kernels.reference import ReferenceAttention
from tests.compute.test_kernels import CHUNKS, DECODES, MIXED, make_case

QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
ITEM_BYTES = (4, 2, 1)  # by the number of a dtype


@pytest.fixture(scope="module")
def arm64(tmp_path_factory: pytest.TempPathFactory) -> CpuAttention:
    if QEMU is None:
        pytest.skip("no emulator of arm64: apt install qemu-user-static")
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("no compiler for arm64: pip install ziglang")
    program = tmp_path_factory.mktemp("arm64") / "attention"
    subprocess.run(
        [
            *(sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl", "-static"),
            *("-std=c++17", "-O2", "-fno-math-errno", "-fno-trapping-math"),
            *("-I", str(Path(cpu_library.__file__).parent)),
            *(str(Path(__file__).with_name("attention_program.cpp")), "-o", str(program)),
        ],
        check=True,
    )

    def attention(packed: bytes) -> int:
        return _run(program, packed)

    def missing(*_: object) -> int:
        raise NotImplementedError

    return CpuAttention(CpuLibrary("arm64", attention, *(missing,) * 6))


def _run(program: Path, packed: bytes) -> int:
    """One call of `stepscope_attention`, whose memory is copied to the program and back."""
    step_at, *tensors_at, output_at, _ = ATTENTION.unpack(packed)
    raw = ctypes.string_at(step_at, STEP.size)
    fields = STEP.unpack(raw)
    starts_at, lengths_at, tables_at, decodes_at, stride, num_requests = fields[:6]
    num_blocks, block_size, num_heads, num_kv_heads, head_dim, dtype, kv_dtype = fields[6:13]
    starts = ctypes.string_at(starts_at, 8 * (num_requests + 1))
    (num_tokens,) = struct.unpack("q", starts[-8:])
    query_bytes = num_tokens * num_heads * head_dim * ITEM_BYTES[dtype]
    cache_bytes = num_blocks * block_size * num_kv_heads * head_dim * ITEM_BYTES[kv_dtype]
    query_at, keys_at, values_at, sinks_at = tensors_at
    arrays = [
        starts,
        ctypes.string_at(lengths_at, 8 * num_requests),
        ctypes.string_at(tables_at, 8 * num_requests * stride),
        ctypes.string_at(decodes_at, 8 * num_requests),
        ctypes.string_at(query_at, query_bytes),
        ctypes.string_at(keys_at, cache_bytes),
        ctypes.string_at(values_at, cache_bytes),
        ctypes.string_at(sinks_at, 4 * num_heads) if sinks_at else b"",
    ]
    given = b"".join([raw, struct.pack("8q", *map(len, arrays)), *arrays])
    assert QEMU is not None
    done = subprocess.run([QEMU, str(program)], input=given, capture_output=True, check=True)
    (status,) = struct.unpack("q", done.stdout[:8])
    ctypes.memmove(output_at, done.stdout[8:], query_bytes)
    return int(status)


@pytest.mark.parametrize("lengths", [DECODES, CHUNKS, MIXED], ids=["decodes", "chunks", "mixed"])
@pytest.mark.parametrize(("head_dim", "window"), [(64, None), (33, 9)])
def test_attention_on_arm64_is_that_of_the_reference(
    arm64: CpuAttention, lengths: list[tuple[int, int]], head_dim: int, window: int | None
) -> None:
    case = make_case(lengths, head_dim=head_dim)
    options = {"scale": 0.3, "sliding_window": window, "sinks": torch.linspace(-2, 3, 4)}
    for dtype, cache_dtypes in CACHES.items():
        for cache_dtype in cache_dtypes:
            query = case.query.to(dtype)
            caches = [cache.to(cache_dtype) for cache in case[1:3]]
            exact = ReferenceAttention()(query.float(), *caches, case.batch, **options)  # type: ignore[arg-type]
            error = (arm64(query, *caches, case.batch, **options).float() - exact).abs()  # type: ignore[arg-type]
            allowed = (
                1e-5 if dtype is torch.float32 else 2**-8 * float(caches[1].float().abs().max())
            )
            assert float(error.max()) <= allowed, (dtype, cache_dtype)
