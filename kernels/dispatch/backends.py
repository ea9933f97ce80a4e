"""Lists the attention backends, finds out which of them run on this machine, and chooses one."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from stepscope.kernels.paged_attention import AttentionBackend, PagedBatch
from stepscope.kernels.reference import ReferenceAttention


class BackendUnavailableError(ValueError):
    """A backend does not exist or does not run on this machine; the message says why."""


class Availability(NamedTuple):
    name: str
    usable: bool
    reason: str


class BackendChoice(NamedTuple):
    backend: AttentionBackend
    reason: str


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A backend that may run on this machine.

    Attributes:
        device: type of device that the backend runs on; None: any.
        probe: called with (device type, dtype); returns whether the backend runs on this machine,
            and why or why not.
    """

    name: str
    device: str | None
    probe: Callable[[str, torch.dtype], tuple[bool, str]]
    create: Callable[[], AttentionBackend]
    widens: bool = True  # can read a KV cache of another dtype than the queries


def _for_gpus(
    name: str,
    dtypes: tuple[torch.dtype, ...],
    what: str,
    create: Callable[[], AttentionBackend],
    *,
    widens: bool,
) -> _Candidate:
    """Make a `_Candidate` for GPUs that tries the backend; `what` tells what it does."""
    return _Candidate(
        name, "cuda", lambda _, dtype: _probe_gpu(create, dtypes, dtype, what), create, widens
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _create_triton() -> AttentionBackend:
    from stepscope.kernels.triton.attention import TritonAttention
    from stepscope.kernels.triton.plan import Device

    return TritonAttention(Device.of(torch.device("cuda")))


def _create_flash_attn() -> AttentionBackend:
    from stepscope.kernels.plain.flash_attention import FlashAttention, load_flash_attn

    return FlashAttention("flash-attn", load_flash_attn(), _create_triton())


@functools.cache
def _probe_gpu(
    create: Callable[[], AttentionBackend],
    dtypes: tuple[torch.dtype, ...],
    dtype: torch.dtype,
    what: str,
) -> tuple[bool, str]:
    """Try a GPU backend with a few tokens. Returns whether it works, and why or why not."""
    if not torch.cuda.is_available():
        return False, "torch sees no GPU"
    if dtype not in dtypes:
        return False, f"has {' and '.join(map(_name, dtypes))}, not {_name(dtype)}"
    try:
        backend = create()
    except ImportError as error:
        missing = {
            "triton": "triton is not installed: pip install triton",
            "flash_attn": "flash-attn is not installed: pip install flash-attn, or flash-attn-4 "
            "for Hopper and Blackwell",
        }.get(error.name or "")
        if missing is not None:
            return False, missing
        return False, f"does not load: {error}"
    except Exception as error:  # noqa: BLE001 - a driver may raise anything
        return False, f"cannot be set up: {(str(error).splitlines() or ['no reason given'])[0]}"
    device = torch.device("cuda")
    problem = trial_failure(backend, device, dtype)
    return problem is None, problem or f"{what}, on {torch.cuda.get_device_name(device)}"


def _probe_cpu(device: str, dtype: torch.dtype) -> tuple[bool, str]:
    from stepscope.kernels.cpu import library as cpu_library

    if dtype not in cpu_library.CACHES:
        return False, f"has float32 and bfloat16, not {_name(dtype)}"
    try:
        level = cpu_library.usable_levels()[-1]
    except cpu_library.LibraryMissingError as error:
        return False, str(error)
    return True, f"C++ on cpu, {level} instructions"


def _create_cpu() -> AttentionBackend:
    from stepscope.kernels.cpu import attention as cpu_attention
    from stepscope.kernels.cpu import library as cpu_library

    return cpu_attention.CpuAttention(cpu_library.load())


def _create_torch() -> AttentionBackend:
    from stepscope.kernels.plain.torch_attention import TorchAttention

    return TorchAttention()


def _create_reference() -> AttentionBackend:
    from stepscope.kernels.reference import ReferenceAttention

    return ReferenceAttention()


# Fastest first: 'auto' chooses the first usable one.
_CANDIDATES = (
    _for_gpus(
        "flash-attn",
        (torch.float16, torch.bfloat16),
        "prefill by flash-attn, decode by our Triton kernel",
        _create_flash_attn,
        widens=False,
    ),
    _for_gpus(
        "triton",
        (torch.float32, torch.float16, torch.bfloat16),
        "prefill and decode by our Triton kernel",
        _create_triton,
        widens=True,
    ),
    _Candidate("cpu", "cpu", _probe_cpu, _create_cpu),
    _Candidate(
        "torch",
        None,
        lambda device, dtype: (True, f"plain PyTorch, batched, on {device}"),
        _create_torch,
    ),
    _Candidate(
        "reference",
        None,
        lambda device, dtype: (True, "plain PyTorch, request by request: slow, for checking"),
        _create_reference,
    ),
)


def _probe(
    candidate: _Candidate, kind: str, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> tuple[bool, str]:
    if candidate.device not in (None, kind):
        return False, f"runs on {candidate.device}, not on {kind}"
    if kv_dtype not in (None, dtype) and not candidate.widens:
        return False, f"reads no KV cache in {_name(kv_dtype)} for queries in {_name(dtype)}"
    return candidate.probe(kind, dtype)


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


def trial_failure(
    backend: AttentionBackend, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Compare `backend` with the reference on a few tokens; return what differs, or None."""
    try:
        for window in (None, 7):
            error = _error(backend, device, dtype, window)
            if not error <= TOLERANCE:
                return f"its results are wrong here (off by {error:.2g} in a trial)"
    except Exception as error:  # noqa: BLE001 - a compiler or a driver may raise anything
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"it fails in a trial: {lines[0][:200]}"
    return None


def _error(
    backend: AttentionBackend, device: torch.device, dtype: torch.dtype, window: int | None
) -> float:
    counts = np.array([new for _, new in LENGTHS])
    contexts = np.array([before + new for before, new in LENGTHS])
    width = -(-int(contexts.max()) // BLOCK_SIZE)
    num_tokens = int(counts.sum())
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(num_tokens, NUM_HEADS, HEAD_DIM, generator=generator)
    caches = torch.randn(
        2, len(LENGTHS) * width, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, generator=generator
    )
    query, caches = query.to(device, dtype), caches.to(device, dtype)
    batch = PagedBatch(
        query_starts=np.concatenate([[0], np.cumsum(counts)]),
        context_lens=contexts,
        block_tables=np.arange(len(LENGTHS) * width).reshape(-1, len(LENGTHS)).T.copy(),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        block_size=BLOCK_SIZE,
        device=device,
    )
    scale = HEAD_DIM**-0.5
    with torch.inference_mode():
        found = backend(query, caches[0], caches[1], batch, scale=scale, sliding_window=window)
        expected = ReferenceAttention()(
            query, caches[0], caches[1], batch, scale=scale, sliding_window=window
        )
        return float((found.float() - expected.float()).abs().max())
