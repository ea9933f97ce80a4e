"""Lists the attention backends, finds out which of them run on this machine, and chooses one."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from stepscope.kernels.cpu import library as cpu_library
from stepscope.kernels.cpu.attention import CpuAttention
from stepscope.kernels.flash_attention import load_flash_attn
from stepscope.kernels.paged_attention import (
    FP8,
    AttentionBackend,
    AttentionOptions,
    LayerCache,
    PagedBatch,
)
from stepscope.kernels.reference import ReferenceAttention
from stepscope.kernels.torch_attention import TorchAttention
from stepscope.kernels.triton.plan import Device


class BackendUnavailableError(ValueError):
    """A backend does not exist or does not run on this machine; the message says why."""


class Availability(NamedTuple):
    name: str
    usable: bool
    reason: str


class BackendChoice(NamedTuple):
    backend: AttentionBackend
    reason: str


class _Candidate(NamedTuple):
    name: str
    device: str | None  # type of device that it runs on; None: any
    dtypes: tuple[torch.dtype, ...]  # of queries; empty: any
    what: str  # it does, on which device
    create: Callable[[], AttentionBackend]
    widens: bool = True  # can read a KV cache of another dtype than the queries


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _create_triton() -> AttentionBackend:
    from stepscope.kernels.triton.attention import TritonAttention  # imports triton

    return TritonAttention(Device.of(torch.device("cuda")))


_FP8_GPUS = (8, 9)  # the least compute capability for which Triton compiles FP8 (e4m3)
# Fastest first: 'auto' chooses the first usable one.
_HALF = (torch.float16, torch.bfloat16)
_CANDIDATES = (
    _Candidate(
        "flash-attn", "cuda", _HALF, "prefill by flash-attn, decode by our Triton kernel, on {}",
        lambda: load_flash_attn(_create_triton()), widens=False,
    ),
    _Candidate(
        "triton", "cuda", (torch.float32, *_HALF), "prefill and decode by our Triton kernel, on {}",
        _create_triton,
    ),
    _Candidate(
        "cpu", "cpu", tuple(cpu_library.CACHES), "C++ on cpu, {} instructions",
        lambda: CpuAttention(cpu_library.load()),
    ),
    _Candidate("torch", None, (), "plain PyTorch, batched, on {}", TorchAttention),
    _Candidate(
        "reference", None, (), "plain PyTorch, request by request: slow, for checking",
        ReferenceAttention,
    ),
)  # fmt: skip


def _probe(
    candidate: _Candidate, kind: str, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> tuple[bool, str]:
    """Return whether a backend runs on this type of device, and why or why not."""
    _, device, dtypes, what, create, widens = candidate
    if device not in (None, kind):
        return False, f"runs on {device}, not on {kind}"
    if kv_dtype not in (None, dtype) and not widens:
        return False, f"reads no KV cache in {_name(kv_dtype)} for queries in {_name(dtype)}"
    if device == "cuda" and not torch.cuda.is_available():
        return False, "torch sees no GPU"
    if dtypes and dtype not in dtypes:
        return False, f"has {' and '.join(map(_name, dtypes))}, not {_name(dtype)}"
    if device == "cuda" and kv_dtype is FP8 and torch.cuda.get_device_capability() < _FP8_GPUS:
        needed = ".".join(map(str, _FP8_GPUS))
        return False, f"reads FP8 on GPUs with a compute capability of {needed} or more"
    if device == "cuda":
        problem = _gpu_problem(create, dtype)
        return problem is None, problem or what.format(torch.cuda.get_device_name())
    if device == "cpu":
        try:
            return True, what.format(cpu_library.usable_levels()[-1])
        except cpu_library.LibraryMissingError as error:
            return False, str(error)
    return True, what.format(kind)


@functools.cache
def _gpu_problem(create: Callable[[], AttentionBackend], dtype: torch.dtype) -> str | None:
    """Try a GPU backend with a few tokens. Returns why it does not work; None if it does."""
    try:
        backend = create()
    except ImportError as error:
        missing = {
            "triton": "triton is not installed: pip install triton",
            "flash_attn": "flash-attn is not installed: pip install flash-attn, or flash-attn-4 "
            "for Hopper and Blackwell",
        }
        return missing.get(error.name or "", f"does not load: {error}")
    except Exception as error:  # noqa: BLE001 - a driver may raise anything
        return f"cannot be set up: {(str(error).splitlines() or ['no reason given'])[0]}"
    return trial_failure(backend, torch.device("cuda"), dtype)


def available_backends(
    device: str = "cpu", dtype: torch.dtype = torch.float32
) -> list[Availability]:
    """List all backends, the fastest first; each with why it can or cannot run on `device`."""
    kind = torch.device(device).type
    return [Availability(c.name, *_probe(c, kind, dtype)) for c in _CANDIDATES]


def choose(
    name: str = "auto",
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
) -> BackendChoice:
    """Create the backend called `name`, or with 'auto' the fastest that runs on `device`.

    Args:
        kv_dtype: dtype of the KV cache; None: that of the queries.

    Returns:
        The backend, and the reason for the choice, which also says why faster backends cannot run.

    Raises BackendUnavailableError: no such backend, or it cannot run on this machine.
    """
    kind = torch.device(device).type
    found = [c for c in _CANDIDATES if name in ("auto", c.name)]
    if not found:
        known = ", ".join(["auto", *(c.name for c in _CANDIDATES)])
        raise BackendUnavailableError(
            f"no attention backend is called {name!r}; there are: {known}"
        )
    reasons: list[tuple[str | None, str]] = []
    for candidate in found:
        usable, reason = _probe(candidate, kind, dtype, kv_dtype)
        if usable:
            missed = [text for device, text in reasons if device in (None, kind)]
            return BackendChoice(candidate.create(), "; ".join([reason, *missed]))
        reasons.append((candidate.device, f"{candidate.name}: {reason}"))
    raise BackendUnavailableError(
        f"attention backend {name!r} cannot run here ({'; '.join(text for _, text in reasons)})"
    )


# (tokens before the step, tokens in it): decodes, a whole prompt, a later chunk.
LENGTHS = ((40, 1), (0, 24), (19, 13), (3, 1))
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 64, 16
# Largest error that rounding to half precision may cause on values of about 1.
TOLERANCE = 0.03


@torch.inference_mode()
def trial_failure(
    backend: AttentionBackend, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Compare `backend` with the reference on a few tokens; return what differs, or None."""
    counts = np.array([new for _, new in LENGTHS])
    contexts = np.array([before + new for before, new in LENGTHS])
    width = -(-int(contexts.max()) // BLOCK_SIZE)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(int(counts.sum()), NUM_HEADS, HEAD_DIM, generator=generator)
    shape = (2, len(LENGTHS) * width, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    caches = torch.randn(shape, generator=generator)
    try:
        query, *caches = (each.to(device, dtype) for each in (query, *caches))
        batch = PagedBatch(
            query_starts=np.concatenate([[0], np.cumsum(counts)]),
            context_lens=contexts,
            block_tables=np.arange(len(LENGTHS) * width).reshape(-1, len(LENGTHS)).T.copy(),
            slot_mapping=torch.zeros(len(query), dtype=torch.int64, device=device),
            block_size=BLOCK_SIZE,
            device=device,
        )
        for window in (None, 7):
            options = AttentionOptions(HEAD_DIM**-0.5, window)
            found, expected = (
                each(query, LayerCache(*caches), batch, options).float()
                for each in (backend, ReferenceAttention())
            )
            error = float((found - expected).abs().max())
            if not error <= TOLERANCE:
                return f"its results are wrong here (off by {error:.2g} in a trial)"
    except Exception as error:  # noqa: BLE001 - a compiler or a driver may raise anything
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"it fails in a trial: {lines[0][:200]}"
    return None
