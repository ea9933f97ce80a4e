"""What laws of scheduling are tried on: any knobs, prompts that begin alike, contents of slots."""

from typing import get_args

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from stepscope.engine.protocol.knobs import Batching, Knobs, Limits

MAX_MODEL_LEN = 48
STOP_TOKEN = 3
LIMITS = Limits(max_num_batched_tokens=96, max_num_seqs=8, max_model_len=MAX_MODEL_LEN)

laws = settings(
    max_examples=60,
    # Explaining a failure takes longer than a test may.
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def knob_sets(draw: st.DrawFn) -> Knobs:
    chunked = draw(st.sampled_from([True, True, False]))
    budget = draw(st.sampled_from([1, 2, 5, 16, 48, 96]))
    return Knobs(
        max_num_batched_tokens=budget if chunked else max(budget, MAX_MODEL_LEN),
        max_num_seqs=draw(st.integers(1, 8)),
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 1, 6])),
        prefill_schedule_interval=draw(st.sampled_from([1, 1, 2, 3, 9])),
        batching=draw(st.sampled_from(get_args(Batching))),
        order=draw(st.sampled_from(["decode_first", "arrival"])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        reserve=draw(st.sampled_from(["none", "prompt", "output"])),
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.1, 0.5])),
    )


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Few beginnings and few tokens, so that prefixes are shared and outputs coincide."""
    beginning = [draw(st.integers(0, 1))] * draw(st.integers(0, 30))
    return beginning + draw(st.lists(st.integers(0, 4), min_size=1, max_size=12))


def contents_of(token_ids: list[int]) -> list[int]:
    """What a slot must hold: a key or value depends on its token and on all before it."""
    contents, so_far = [], 0
    for token_id in token_ids:
        so_far = hash((so_far, token_id))
        contents.append(so_far)
    return contents
