"""The benchmark's parts, their sizes, and which worker process measures them.

Does not import torch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stepscope.engine.models.random_shapes import SHAPES
from stepscope.engine.protocol.settings.knobs import ConfigError


class BenchPart(msgspec.Struct, frozen=True):
    """A part of the benchmark.

    `weight` sets its share of the total time. It is about a fifth of its seconds on an H200.
    """

    name: str
    weight: float


PARTS: dict[str, BenchPart] = {
    "a": BenchPart("ceilings: a large copy and a large product", 1),
    "b": BenchPart("decode, share of the bandwidth floor", 2),
    "c": BenchPart("prefill, share of the rate of a large product", 2),
    "d": BenchPart("step time over tokens, and its knee", 1),
    "e": BenchPart("kernels alone", 4),
    "f": BenchPart("256-request yardstick", 5),
    "g": BenchPart("the same work through transformers' generate_batch", 3),
    "h": BenchPart("long prompts among decodes, in each batching mode", 7),
    "i": BenchPart("telemetry on and off", 3),
    "j": BenchPart("exactness against transformers", 4),
}
# These parts report shares of the ceilings, so they need part (a).
NEED_CEILINGS = "bcde"
PEER_WEIGHT = 12.0  # of transformers' side of (g)
START_WEIGHT = 4.0  # of loading a model, compiling kernels and recording graphs
MODELS = ("qwen3-0.6b", "qwen3-8b", "llama-3.1-8b")
QUICK_MODELS = ("qwen3-tiny", "llama-tiny")


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much each part measures: batch sizes, lengths, numbers of samples.

    The defaults are for a data-centre GPU.
    """

    copy_bytes: int = 4 << 30
    product_side: int = 8192
    batches: tuple[int, ...] = (1, 8, 32, 128, 256)
    contexts: tuple[int, ...] = (512, 4096)
    prefills: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    curve: tuple[int, ...] = (
        *(1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768),
        *(1024, 1536, 2048, 3072, 4096, 6144, 8192),
    )
    num_samples: int = 20
    kernel_shrink: int = 1  # batches, contexts and chunks of (e) are divided by it
    kernel_heads: tuple[tuple[int, int, int], ...] = ((32, 8, 128), (16, 8, 128))
    rotation_bytes: int = 512 << 20  # several times the L2 of an H200
    yardstick_requests: int = 256
    yardstick_lengths: tuple[int, int] = (100, 1024)
    peer_requests: tuple[int, ...] = (32, 256)
    peer_first_output: int = 16
    num_streams: int = 64
    stream_prompt: int = 256
    stream_output: int = 256
    num_arrivals: int = 4
    arrival_prompt: int = 16384
    arrival_spacing: int = 48  # tokens of each stream between two arrivals
    budget: int = 2048  # token budget of the modes that split prompts into chunks
    telemetry_pairs: int = 5
    telemetry_requests: int = 64
    telemetry_output: int = 128
    exact_prompts: tuple[int, ...] = (7, 64, 333, 1000)
    exact_tokens: int = 32
    max_model_len: int = 20480
    seq_capacity: int = 256
    kv_memory: str = "auto"


FULL = Sizes()
QUICK = Sizes(
    copy_bytes=1 << 20,
    product_side=256,
    batches=(1, 4),
    contexts=(16, 48),
    prefills=(16, 64),
    curve=(1, 2, 4, 8, 16, 64, 128, 192, 256),
    num_samples=5,
    kernel_shrink=64,
    kernel_heads=((4, 2, 32),),
    rotation_bytes=1 << 14,
    yardstick_requests=6,
    yardstick_lengths=(4, 24),
    peer_requests=(4,),
    peer_first_output=4,
    num_streams=4,
    stream_prompt=8,
    stream_output=24,
    num_arrivals=2,
    arrival_prompt=192,
    arrival_spacing=6,
    budget=64,
    telemetry_pairs=2,
    telemetry_requests=4,
    telemetry_output=8,
    exact_prompts=(5, 33),
    exact_tokens=8,
    max_model_len=320,
    seq_capacity=8,
    kv_memory="16MB",
)


class PeerWork(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that transformers and stepscope both run in (g).

    These are the first `num_requests` of the yardstick, with outputs cut to `most_output` tokens.
    """

    num_requests: int
    most_output: int

    @property
    def in_words(self) -> str:
        return f"{self.num_requests} requests, outputs up to {self.most_output}"


class BenchJob(msgspec.Struct, kw_only=True):
    """What one worker process measures: some parts on one model, in order."""

    parts: str  # letters
    model: str | None
    device: str
    is_quick: bool
    is_peer: bool = False  # transformers' side of (g), else ours
    seconds: float = 0.0  # time limit
    peer_works: list[PeerWork] = msgspec.field(default_factory=list)  # for our side of (g)
    recorder: list[str] = msgspec.field(default_factory=list)  # command for (h), see `arrivals`
    recordings: dict[str, str] = msgspec.field(default_factory=dict)  # file by batching mode

    @property
    def sizes(self) -> Sizes:
        return QUICK if self.is_quick else FULL

    @property
    def weight(self) -> float:
        return START_WEIGHT + sum(self.part_weight(part) for part in self.parts)

    def part_weight(self, part: str) -> float:
        return PEER_WEIGHT if self.is_peer else PARTS[part].weight


class Hello(msgspec.Struct, tag=True):
    """Sent by a worker process before it measures: its device, and its software versions."""

    device: str
    is_gpu: bool
    versions: dict[str, str]


class Doing(msgspec.Struct, tag=True):
    """Sent by a worker process: what it measures now, as text for the user."""

    part: str
    detail: str


class Begun(msgspec.Struct, tag=True):
    part: str
    model: str | None


class Found(msgspec.Struct, tag=True):
    """Sent by a worker process: a point (`results.BenchPoint`) of the part in progress."""

    point: Any


class Ended(msgspec.Struct, tag=True):
    """Sent by a worker process: the part in progress has ended.

    `why` says why the part is incomplete. None if it is complete.
    """

    seconds: float
    why: str | None
    settings: dict[str, Any]


class Failed(msgspec.Struct, tag=True):
    """Sent by a worker process: the job cannot be measured, or not any further."""

    why: str


Message = Hello | Doing | Begun | Found | Ended | Failed


def plan_jobs(
    parts: str, models: Sequence[str], device: str, *, is_quick: bool, for_mode: Mapping[str, str]
) -> list[BenchJob]:
    """Return the jobs that measure `parts` (letters) on `models`, in the order in which they run.

    - (a) and (e) need no model.
    - (b), (c) and (d) run on every model.
    - (f) and (g) run on the first two models.
    - (h) runs on the second model, or on the only one.
    - (i) and (j) run on the first model. The cost in (i) weighs most with short steps.

    Args:
        for_mode: for each batching mode to record in (h), the file to write.
    """

    def job(letters: str, model: str | None, **more: Any) -> BenchJob | None:
        letters = "".join(each for each in letters if each in parts)
        if not letters:
            return None
        return BenchJob(parts=letters, model=model, device=device, is_quick=is_quick, **more)

    if any(each in parts for each in NEED_CEILINGS):
        parts += "a"
    jobs = [job("ae", None), job("j", models[0])]
    for place, model in enumerate(models):
        letters = "bcd"
        if place < 2:
            jobs.append(job("g", model, is_peer=True))
            letters += "fg"
        if place == min(1, len(models) - 1):
            letters += "h"
        if place == 0:
            letters += "i"
        jobs.append(job(letters, model, recordings=dict(for_mode)))
    return [each for each in jobs if each is not None]


def chosen_parts(only: str | None, skip: str | None) -> str:
    """Return the letters of the parts to measure: those of `--only`, without those of `--skip`.

    Raises:
        ConfigError: a letter names no part, or no part is left.
    """
    chosen = _letters("--only", only) if only is not None else "".join(PARTS)
    dropped = _letters("--skip", skip) if skip is not None else ""
    left = "".join(each for each in PARTS if each in chosen and each not in dropped)
    if not left:
        raise ConfigError("parts", "--only and --skip leave nothing to measure")
    return left


def chosen_models(models: str | None, *, is_quick: bool) -> list[str]:
    """Return the names in `--models A,B`, or the default models if the option is missing.

    Raises:
        ConfigError: a name is unknown.
    """
    if models is None:
        return list(QUICK_MODELS if is_quick else MODELS)
    names = list(dict.fromkeys(name.strip() for name in models.split(",")))
    for name in names:
        if name not in SHAPES:
            raise ConfigError(
                "models", f"--models: no shape is called {name!r}; there are: {', '.join(SHAPES)}"
            )
    return names


def _letters(option: str, text: str) -> str:
    letters = [each.strip() for each in text.replace(",", " ").split()]
    for each in letters:
        if each not in PARTS:
            known = ", ".join(f"{letter} ({part.name})" for letter, part in PARTS.items())
            raise ConfigError("parts", f"{option}: there is no part {each!r}; there are: {known}")
    return "".join(letters)


def share_of(left_s: float, weight: float, weights: float) -> float:
    """Return the seconds for the next job or part: the remaining time, shared out by weight.

    Args:
        weight: weight of the next job or part.
        weights: sum of the weights of all that are still to come, including the next.
    """
    return max(0.0, left_s) * weight / weights if weights else 0.0
