"""Kernels compiled for arm64 (NEON), run on an emulated processor, equal the reference."""

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
from stepscope.kernels.cpu import linear as cpu_linear
from stepscope.kernels.cpu.attention import CpuAttention
from stepscope.kernels.cpu.library import ATTENTION, CACHES, LINEAR, STEP, CpuLibrary
from stepscope.kernels.cpu.linear import PackedLinear
from stepscope.kernels.paged_attention import AttentionOptions
from stepscope.kernels.reference import ReferenceAttention
from tests.compute.test_kernels import CHUNKS, DECODES, MIXED, make_case

QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
ITEM_BYTES = (4, 2, 1)  # by the number of a dtype


@pytest.fixture(scope="module")
def arm64(tmp_path_factory: pytest.TempPathFactory) -> CpuLibrary:
    if QEMU is None:
        pytest.skip("no emulator of arm64: apt install qemu-user-static")
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("no compiler for arm64: pip install ziglang")
    programs = [
        _compiled(name, tmp_path_factory.mktemp("arm64")) for name in ("attention", "linear")
    ]

    def attention(packed: bytes) -> int:
        return _attention(programs[0], packed)

    def linear(packed: bytes) -> int:
        return _linear(programs[1], packed)

    def linear_width() -> int:
        return int.from_bytes(_output(programs[1], b"")[:8], "little")

    def missing(*_: object) -> int:
        raise NotImplementedError

    return CpuLibrary("arm64", attention, *(missing,) * 4, linear, linear_width)


def _compiled(name: str, folder: Path) -> Path:
    program = folder / name
    subprocess.run(
        [
            *(sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl", "-static"),
            *("-std=c++17", "-O2", "-fno-math-errno", "-fno-trapping-math"),
            *("-I", str(Path(cpu_library.__file__).parent)),
            *(str(Path(__file__).with_name(f"{name}_program.cpp")), "-o", str(program)),
        ],
        check=True,
    )
    return program


def _output(program: Path, given: bytes) -> bytes:
    return subprocess.run([QEMU, str(program)], input=given, capture_output=True, check=True).stdout


def _linear(program: Path, packed: bytes) -> int:
    """One call of `stepscope_linear` in fp32; its memory is copied to the program and back."""
    x_at, packed_at, bias_at, output_at, *numbers = LINEAR.unpack(packed)
    num_rows, num_columns, size, num_panels, *_, is_bf16 = numbers
    assert not is_bf16
    width = int.from_bytes(_output(program, b"")[:8], "little")
    arrays = [
        ctypes.string_at(x_at, 4 * num_rows * size),
        ctypes.string_at(packed_at, 2 * num_panels * width * size),
        ctypes.string_at(bias_at, 4 * num_panels * width) if bias_at else b"",
    ]
    given = b"".join([packed, struct.pack("3q", *map(len, arrays)), *arrays])
    _, status = struct.unpack("2q", (said := _output(program, given))[:16])
    ctypes.memmove(output_at, said[16:], 4 * num_rows * num_columns)
    return int(status)


def _attention(program: Path, packed: bytes) -> int:
    """One call of `stepscope_attention`; its memory is copied to the program and back."""
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
    said = _output(program, given)
    (status,) = struct.unpack("q", said[:8])
    ctypes.memmove(output_at, said[8:], query_bytes)
    return int(status)


@pytest.mark.parametrize("lengths", [DECODES, CHUNKS, MIXED], ids=["decodes", "chunks", "mixed"])
@pytest.mark.parametrize(("head_dim", "window"), [(64, None), (33, 9)])
def test_attention_on_arm64_equals_the_reference(
    arm64: CpuLibrary, lengths: list[tuple[int, int]], head_dim: int, window: int | None
) -> None:
    case = make_case(lengths, head_dim=head_dim)
    attention = CpuAttention(arm64)
    options = AttentionOptions(0.3, window, sinks=torch.linspace(-2, 3, 4))
    for dtype, cache_dtypes in CACHES.items():
        for cache_dtype in cache_dtypes:
            given = case.to(dtype, cache_dtype)
            exact = ReferenceAttention()(given.query.float(), *given[1:], options)
            error = (attention(*given, options).float() - exact).abs()
            largest = float(given.cache.values.float().abs().max())
            allowed = 1e-5 if dtype is torch.float32 else 2**-8 * largest
            assert float(error.max()) <= allowed, (dtype, cache_dtype)


@pytest.mark.parametrize("num_rows", [1, 3, 17])
@pytest.mark.parametrize("has_bias", [False, True])
def test_weights_in_bf16_are_widened_on_arm64(
    arm64: CpuLibrary, monkeypatch: pytest.MonkeyPatch, num_rows: int, has_bias: bool
) -> None:
    monkeypatch.setattr(cpu_linear, "default_library", lambda: arm64)
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, 46, generator=generator)
    weight = torch.randn(37, 46, generator=generator).bfloat16().float()
    bias = torch.randn(37, generator=generator) if has_bias else None
    exact = torch.nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    assert float((PackedLinear(weight, bias)(x) - exact).abs().max()) < 1e-4
    gate, up = weight[:18].double(), weight[18:36].double()
    gated = torch.nn.functional.silu(x.double() @ gate.T) * (x.double() @ up.T)
    assert float((PackedLinear(weight[:36], None, is_gated=True)(x) - gated).abs().max()) < 1e-4
