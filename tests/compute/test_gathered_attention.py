"""Prefill by a library's attention, over packed keys or pages: stepscope hands them over correctly.

The libraries run on a GPU only. Here a plain function with the same signature takes their place,
which attends as they document it, and refuses what they refuse.
"""

import sys
from importlib import metadata
from types import ModuleType
from typing import Any

import pytest
import torch

from stepscope.kernels.dispatch import backends
from stepscope.kernels.dispatch.backends import (
    BackendUnavailableError,
    available_backends,
    choose,
)
from stepscope.kernels.flash_attention import FlashAttention, load_flash_attn
from stepscope.kernels.paged_attention import AttentionOptions
from stepscope.kernels.reference import ReferenceAttention
from stepscope.kernels.torch_attention import TorchAttention
from tests.compute.test_kernels import MIXED, make_case

CPU = torch.device("cpu")


class Library:
    """Attention over packed sequences as both libraries document it; records its arguments."""

    def __init__(self, *, top_left: bool = False) -> None:
        self.calls: list[dict[str, Any]] = []
        self._top_left = top_left  # another way to align a mask, wrong here

    def attend(
        self,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        lens: tuple[torch.Tensor, torch.Tensor, int, int],
        scale: float,
        window: tuple[int, int],
        softcap: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        (q, k, v), (starts, key_starts, most_queries, most_keys) = tensors, lens
        self.calls.append({"queries": len(q), "keys": len(k), "window": window, "softcap": softcap})
        assert starts.dtype == key_starts.dtype == torch.int32
        assert most_queries == int(starts.diff().max())
        assert most_keys == int(key_starts.diff().max())
        left, right = window
        outputs = []
        for r in range(len(starts) - 1):
            query = q[starts[r] : starts[r + 1]].float()
            key, value = (
                t[key_starts[r] : key_starts[r + 1]]
                .float()
                .repeat_interleave(q.shape[1] // t.shape[1], dim=1)
                for t in (k, v)
            )
            scores = torch.einsum("qhd,khd->hqk", query, key) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            shift = 0 if self._top_left else len(key) - len(query)
            distance = torch.arange(len(query))[:, None] + shift - torch.arange(len(key))
            hidden = distance < -right
            if left >= 0:
                hidden |= distance > left
            scores = scores.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                column = sinks.float()[:, None, None].expand(-1, len(query), 1)
                scores = torch.cat([scores, column], dim=-1)
            weights = scores.softmax(-1)[..., : len(key)]
            outputs.append(torch.einsum("hqk,khd->qhd", weights, value))
        return torch.cat(outputs).to(q.dtype)

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """As in flash-attn 2.8."""
        assert dropout_p == 0
        assert causal
        window = (window_size[0], 0)
        lens = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return self.attend((q, k, v), lens, softmax_scale, window, softcap)

    def flash_attn_4_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        qv: None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        min_seqlen_k: int | None = None,
        seqused_q: torch.Tensor | None = None,
        seqused_k: torch.Tensor | None = None,
        gather_kv_indices: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int | None, int | None] = (None, None),
        learnable_sink: torch.Tensor | None = None,
        softcap: float = 0.0,
    ) -> tuple[torch.Tensor, None]:
        """As in flash-attn 4.0.0b36 on Hopper, whose further arguments are not used here."""
        assert causal
        assert q.dtype == k.dtype == v.dtype
        (_, num_heads, head_dim), num_requests = q.shape, len(cu_seqlens_q) - 1
        assert num_heads % k.shape[-2] == 0
        assert 8 <= head_dim <= 256
        assert head_dim % 8 == 0
        known = [t for t in (cu_seqlens_q, cu_seqlens_k, seqused_k) if t is not None]
        assert all(t.dtype == torch.int32 and t.stride(0) == 1 for t in known)
        if learnable_sink is not None:
            assert learnable_sink.shape == (num_heads,)
            assert learnable_sink.dtype in (torch.float16, torch.bfloat16, torch.float32)
        if page_table is None:
            assert cu_seqlens_k.shape == (num_requests + 1,)
            assert k.shape == v.shape == (len(k), k.shape[1], head_dim)
        else:
            assert cu_seqlens_k is None
            assert seqused_k.shape == (num_requests,)
            assert page_table.dtype == torch.int32
            assert page_table.shape == (num_requests, page_table.shape[1])
            assert page_table.stride(-1) == 1
            assert k.shape == v.shape == (*k.shape[:2], k.shape[2], head_dim)
            assert head_dim % 16 == 0, "Paged KV does not support irregular head dim"
            assert k.untyped_storage().size() > k.nbytes, "keys were copied"
            used = [slice(0, int(num_keys)) for num_keys in seqused_k]
            k, v = (
                torch.cat([c[t].flatten(0, 1)[u] for t, u in zip(page_table, used, strict=True)])
                for c in (k, v)
            )
            cu_seqlens_k = torch.nn.functional.pad(seqused_k.cumsum(0), (1, 0)).int()
        window = (-1 if window_size[0] is None else window_size[0], 0)
        most = (int(cu_seqlens_q.diff().max()), int(cu_seqlens_k.diff().max()))
        lens = (cu_seqlens_q, cu_seqlens_k, *most)
        found = self.attend((q, k, v), lens, softmax_scale, window, softcap, learnable_sink)
        self.calls[-1]["paged"] = page_table is not None
        return found, None


def create(name: str, library: Library) -> FlashAttention:
    """A backend that also takes fp32, unlike the libraries, to be compared with the oracle."""
    backend = {
        "flash-attn": FlashAttention(library.flash_attn_varlen_func, 2, TorchAttention()),
        "flash-attn-4": FlashAttention(library.flash_attn_4_varlen_func, 4, TorchAttention()),
    }[name]
    backend.dtypes = (torch.float32, torch.bfloat16)
    return backend


# flash-attn 4 reads the pages of heads whose width is a multiple of 16.
@pytest.mark.parametrize(
    ("name", "head_dim"), [("flash-attn", 8), ("flash-attn-4", 8), ("flash-attn-4", 16)]
)
@pytest.mark.parametrize("lengths", [MIXED, [(0, 9), (7, 3)], [(9, 1), (4, 1)], [(3, 4), (5, 0)]])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 1},
        {"sliding_window": 6},
        {"softcap": 2.0},
        {"sinks": torch.linspace(-1, 2, 4), "sliding_window": 30},
    ],
)
def test_prefill_by_a_library_equals_the_reference(
    name: str, head_dim: int, lengths: list[tuple[int, int]], options: dict[str, Any]
) -> None:
    case = make_case(lengths, head_dim=head_dim)
    expected = ReferenceAttention()(*case, AttentionOptions(0.6, **options))
    backend = create(name, Library())
    for _ in range(2):  # as in two layers
        found = backend(*case, AttentionOptions(0.6, **options))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_attention_library_gets_prefill_chunks_and_only_the_keys_they_attend_to() -> None:
    library = Library()
    create("flash-attn", library)(*make_case(MIXED), AttentionOptions(0.6, 10))
    (call,) = library.calls
    assert call["queries"] == 33 + 5 + 2
    assert call["keys"] == 33 + (5 + 9) + 4
    assert call["window"] == (9, 0)


@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_flash_attn_4_reads_the_pages_of_a_chunk_in_place(block_size: int) -> None:
    library = Library()
    case = make_case(MIXED, block_size=block_size, head_dim=64)
    options = {"sliding_window": 10, "softcap": 2.0, "sinks": torch.linspace(-1, 2, 4)}
    found = create("flash-attn-4", library)(*case, AttentionOptions(0.6, **options))
    torch.testing.assert_close(
        found, ReferenceAttention()(*case, AttentionOptions(0.6, **options)), rtol=1e-5, atol=1e-5
    )
    (call,) = library.calls
    assert call["queries"] == 33 + 5 + 2
    assert call["keys"] == 33 + 95 + 4
    assert call["window"] == (9, 0)
    assert call["paged"]


def test_attention_with_an_option_the_library_lacks_uses_another_backend() -> None:
    library = Library()
    create("flash-attn", library)(*make_case(MIXED), AttentionOptions(0.6, sinks=torch.zeros(4)))
    assert not library.calls


def test_heads_and_dtypes_that_the_attention_library_refuses_use_another_backend() -> None:
    library = Library()
    case = make_case(MIXED)
    backend = FlashAttention(library.flash_attn_varlen_func, 2, TorchAttention())
    backend(*case, AttentionOptions(0.6))  # fp32
    half = case.to(torch.bfloat16)
    backend.head_dims = (16,)
    backend(*half, AttentionOptions(0.6))
    assert not library.calls
    backend.head_dims = (8,)
    backend(*half, AttentionOptions(0.6))
    assert len(library.calls) == 1


def test_the_trial_run_rejects_a_backend_with_wrong_results() -> None:
    good = create("flash-attn", Library())
    assert backends.trial_failure(good, CPU, torch.bfloat16) is None
    assert backends.trial_failure(TorchAttention(), CPU, torch.float32) is None
    # A mask that is aligned at the first key instead of the last.
    bad = create("flash-attn", Library(top_left=True))
    assert "its results are wrong here" in (backends.trial_failure(bad, CPU, torch.bfloat16) or "")

    class Broken:
        name = "broken"

        def __call__(self, *args: object, **kwargs: object) -> torch.Tensor:
            raise RuntimeError("no kernel image is available\nmore")

    assert (
        backends.trial_failure(Broken(), CPU, torch.float32)
        == "it fails in a trial: no kernel image is available"
    )


# Every backend that runs on this machine, on each of its devices.
HERE = [
    (device, each.name)
    for device in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]
    for each in available_backends(device, torch.bfloat16)
    if each.usable and each.name != "reference"
]


@pytest.mark.parametrize(("device", "name"), HERE, ids="-".join)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 40}, {"softcap": 2.0}])
def test_every_backend_of_this_machine_is_near_the_reference_in_half_precision(
    device: str, name: str, options: dict[str, Any]
) -> None:
    lengths = [(700, 1), (0, 130), (90, 5), (3, 1), (300, 60)]
    half = make_case(lengths, block_size=16, head_dim=64, device=device).to(torch.bfloat16)
    asked = AttentionOptions(0.125, **options)
    found = choose(name, device, torch.bfloat16).backend(*half, asked)
    exact = ReferenceAttention()(*half.to(torch.float32), asked)
    # Weights and the result are rounded to 8 bits.
    largest = float(half.cache.values.abs().max())
    assert float((found.float() - exact).abs().max()) <= 2**-7 * largest


def test_a_gpu_backend_that_cannot_be_used_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a machine with a GPU that lacks a package, or whose driver does not answer."""
    problem = backends._gpu_problem.__wrapped__
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def lacks(module: str) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    def breaks() -> None:
        raise RuntimeError("CUDA driver version is insufficient\nmore")

    reasons = {each.name: each.reason for each in available_backends("cuda", torch.float32)}
    assert reasons["flash-attn"] == "has float16 and bfloat16, not float32"

    for create, expected in (
        (
            lambda: lacks("flash_attn"),
            "flash-attn is not installed: pip install flash-attn, or flash-attn-4 for Hopper and "
            "Blackwell",
        ),
        (lambda: lacks("triton"), "triton is not installed: pip install triton"),
        (lambda: lacks("einops"), "does not load: No module named 'einops'"),
        (breaks, "cannot be set up: CUDA driver version is insufficient"),
    ):
        assert problem(create, torch.bfloat16) == expected


def test_on_gpus_whose_triton_has_no_fp8_plain_torch_reads_such_a_kv_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton's compiler refuses it there, when the model is loaded."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    monkeypatch.setattr(backends, "_gpu_problem", lambda create, dtype: None)
    asked = "cuda", torch.bfloat16, torch.float8_e4m3fn
    chosen, reason = choose("auto", *asked)
    assert chosen.name == "torch"
    assert "triton: reads FP8 on GPUs with a compute capability of 8.9 or more" in reason
    with pytest.raises(BackendUnavailableError, match=r"'triton' cannot run here .*8\.9"):
        choose("triton", *asked)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    triton = next(each for each in backends._CANDIDATES if each.name == "triton")
    assert backends._probe(triton, *asked)[0]


def test_flash_attn_4_is_taken_on_the_gpus_that_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = ["flash-attn-4"]
    monkeypatch.setattr(
        metadata, "distributions", lambda name: [each for each in installed if each == name]
    )
    two, four = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    vars(four)["flash_attn_varlen_func"] = Library().flash_attn_4_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", two)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", four)

    def reads_pages(*capability: int) -> bool:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        return bool(load_flash_attn(TorchAttention()).paged_head_dims)

    assert reads_pages(9, 0)
    assert reads_pages(10, 3)
    needs = (
        r"flash-attn 4 needs a compute capability of 9, 10, 11, this GPU has 8\.6; and flash-attn"
    )
    with pytest.raises(ImportError, match=needs):
        reads_pages(8, 6)
    vars(two)["flash_attn_varlen_func"] = Library().flash_attn_varlen_func
    assert not reads_pages(12, 0)
    installed.clear()
    assert not reads_pages(9, 0)
