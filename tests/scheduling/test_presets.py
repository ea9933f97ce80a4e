"""`--like`: another engine's defaults, by class of GPU."""

import pytest

from stepscope.engine.protocol.engine_config import EngineConfig
from stepscope.engine.protocol.knobs import Knobs, Limits, WrongValue
from stepscope.engine.scheduling.presets import PRESETS, Defaults, defaults_like


def every_one() -> list[Defaults]:
    return [
        defaults_like(f"{name}/{gpu}" if gpu else name)
        for name, preset in PRESETS.items()
        for group in preset.gpu_classes
        for gpu in group.gpus or ("",)
    ]


def test_every_preset_is_a_valid_configuration() -> None:
    for each in every_one():
        engine = EngineConfig(**each.engine)  # type: ignore[arg-type]
        limits = Limits(
            max_num_batched_tokens=engine.token_capacity,
            max_num_seqs=engine.seq_capacity,
            max_model_len=4096,
        )
        assert Knobs().changed(each.knobs, limits).as_dict() == {**Knobs().as_dict(), **each.knobs}


@pytest.mark.parametrize(
    ("text", "budget", "seqs", "reserve", "batching"),
    [
        ("vllm", 8192, 1024, "prompt", "chunked"),
        ("vllm/a100", 2048, 256, "prompt", "chunked"),
        ("vllm/b200", 16384, 1024, "prompt", "chunked"),
        ("SGLang/t4", 2048, 2048, "output", "separate"),
        ("mini-sglang", 8192, 256, "output", "separate"),
        ("tensorrt-llm", 8192, 2048, "output", "chunked"),
    ],
)
def test_the_preset_for_another_engine_depends_on_the_gpu(
    text: str, budget: int, seqs: int, reserve: str, batching: str
) -> None:
    knobs = defaults_like(text).knobs
    assert (knobs["max_num_batched_tokens"], knobs["max_num_seqs"]) == (budget, seqs)
    assert (knobs["reserve"], knobs["batching"]) == (reserve, batching)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("orca", "there are: vllm, sglang, mini-sglang, tensorrt-llm"),
        ("vllm/tpu", "no class for a GPU called 'tpu'"),
    ],
)
def test_an_unknown_engine_or_gpu_gives_a_one_line_error(text: str, said: str) -> None:
    with pytest.raises(WrongValue, match=said):
        defaults_like(text)
