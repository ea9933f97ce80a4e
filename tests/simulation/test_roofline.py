"""Step times of a model from a GPU's data sheet: what makes a step longer, and by how much."""

from pathlib import Path

import msgspec
import pytest

from stepscope.engine.models.made_checkpoints import SHAPES
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import Phase
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.step import ScheduledRow, ScheduledStep
from stepscope.engine.simulation.model_shape import (
    KNOWN_MODELS,
    ModelShape,
    model_shape,
    shape_of_config,
)
from stepscope.engine.simulation.roofline import GPUS, RooflineModel, gpu_named, num_kv_tokens
from stepscope.engine.simulation.step_time import StepShape, shape_of

H100 = GPUS["h100"]


def decodes(count: int, context: int = 1000) -> StepShape:
    return StepShape(count, count, 0, 0, count * context)


def prefill(num_tokens: int) -> StepShape:
    return StepShape(1, 0, num_tokens, num_tokens * (num_tokens + 1) // 2, 0, num_tokens)


def step_ms(gpu: str, model: str, step: StepShape, tensor_parallel: int = 1) -> float:
    roofline = RooflineModel(GPUS[gpu], model_shape(model), tensor_parallel)
    return roofline.step_time(step).cycle_s * 1e3


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.6),
        ("qwen3-0.6b", 0.596),
        ("qwen3-32b", 32.8),
        ("mixtral-8x7b", 46.7),
        ("qwen3-30b-a3b", 30.5),
        ("llama-4-scout", 107.8),  # of the text model
    ],
)
def test_model_shapes_have_the_published_parameter_counts(model: str, billions: float) -> None:
    assert model_shape(model).memory_bytes / 2 == pytest.approx(billions * 1e9, rel=0.01)


def test_no_simulated_step_is_faster_than_reading_the_memory_it_needs() -> None:
    for model in KNOWN_MODELS:
        shape = model_shape(model)
        if not shape.num_experts:
            floor_ms = shape.weight_bytes / H100.bytes_per_s * 1e3
            assert step_ms("h100", model, decodes(1)) > floor_ms


def test_step_time_grows_with_rows_context_and_tokens() -> None:
    few, more = (step_ms("h100", "llama-3.1-8b", decodes(count)) for count in (8, 64))
    longer = step_ms("h100", "llama-3.1-8b", decodes(64, context=8000))
    assert few < more < longer
    # Above the knee a prompt costs its operations: twice the tokens, twice the time.
    one, two = (step_ms("h100", "llama-3.1-8b", prefill(count)) for count in (2048, 4096))
    assert two / one == pytest.approx(2, rel=0.1)


def test_tensor_parallelism_shortens_a_step_by_less_than_the_number_of_gpus() -> None:
    one, four = (step_ms("h100", "llama-3.1-70b", decodes(16), count) for count in (1, 4))
    assert one / 4 < four < one / 2


def test_a_larger_batch_reads_more_experts() -> None:
    shape = model_shape("mixtral-8x7b")
    assert shape.num_experts_used(1) == pytest.approx(2)
    assert shape.num_experts_used(100) == pytest.approx(8)
    one, many = (step_ms("h100", "mixtral-8x7b", decodes(count, 1), 2) for count in (1, 32))
    dense = [step_ms("h100", "yi-34b", decodes(count, 1), 2) for count in (1, 32)]
    assert many / one > 2 > dense[1] / dense[0]


def test_fp8_halves_quantised_weights_but_not_the_others() -> None:
    whole, halved = model_shape("llama-4-scout"), model_shape("llama-4-scout-fp8")
    assert halved.attention_bytes == whole.attention_bytes == 2
    assert 0.5 < halved.weight_bytes / whole.weight_bytes < 0.55


def test_the_simulated_kv_cache_gets_the_memory_left_by_the_weights() -> None:
    # vLLM 0.19 counted 41,408 tokens there, with gpu_memory_utilization 0.9.
    assert num_kv_tokens(GPUS["rtx4090"], model_shape("llama-3.1-8b")) == pytest.approx(
        41_408, rel=0.02
    )
    with pytest.raises(ConfigError, match=r"take more GPUs"):
        num_kv_tokens(H100, model_shape("llama-3.1-70b"))


def test_a_models_config_json_is_read_from_its_file_or_folder(tmp_path: Path) -> None:
    config = {**SHAPES["llama-3.1-8b"], "quantization_config": {"quant_method": "fp8"}}
    file = tmp_path / "config.json"
    file.write_bytes(msgspec.json.encode(config))
    for path in (file, tmp_path):
        shape = model_shape(str(path))
        assert shape.mlp_bytes == shape.attention_bytes == 1
        assert shape.num_layers == 32


@pytest.mark.parametrize(
    ("name", "like", "mlp_bytes"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b", 2),
        ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b", 2),
        ("neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8", "llama-3.1-8b", 1),
        ("llama-3.1-8b-fp8", "llama-3.1-8b", 1),
        ("RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic", "llama-4-scout-fp8", 1),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b", 2),
    ],
)
def test_hugging_face_model_names_are_recognised_by_prefix(
    name: str, like: str, mlp_bytes: int
) -> None:
    found, known = model_shape(name), model_shape(like)
    assert found.num_layers == known.num_layers
    assert found.attention_bytes == (2 if "scout" in like else mlp_bytes)
    assert found.mlp_bytes == mlp_bytes


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("RTX 4090", "rtx4090"),
        ("rtx-4090", "rtx4090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("H100-SXM5-80GB", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("A100-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("AMD Instinct MI300X OAM", "mi300x"),
    ],
)
def test_gpus_are_found_by_several_spellings_and_the_names_that_drivers_print(
    printed: str, name: str
) -> None:
    assert gpu_named(printed) is GPUS[name]


@pytest.mark.parametrize(
    "other", ["NVIDIA A100-SXM4-40GB", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA GH200 480GB"]
)
def test_a_gpu_with_other_rates_is_not_taken_for_one_that_is_known(other: str) -> None:
    with pytest.raises(ConfigError, match=r"no GPU .*there are: h100, h200"):
        gpu_named(other)


def test_unknown_models_are_refused_with_the_known_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"llama-3.1-8b.*or give the path of a config.json"):
        model_shape("gpt-7")
    with pytest.raises(ConfigError, match=r"no hidden_size"):
        shape_of_config("broken", {"num_hidden_layers": 2})
    bad = tmp_path / "config.json"
    bad.write_text("{")
    with pytest.raises(ConfigError, match=r"is no config.json"):
        model_shape(str(bad))


def test_heads_that_tensor_parallelism_cannot_split_are_refused() -> None:
    shape: ModelShape = model_shape("llama-3.1-8b")
    with pytest.raises(ConfigError, match=r"32 heads .* cannot be split over 3 GPUs"):
        RooflineModel(H100, shape, 3)


def row(phase: Phase, start: int, num_tokens: int) -> ScheduledRow:
    request = Request(0, [1] * 100, SamplingParams(max_tokens=9), arrival_ns=0)
    return ScheduledRow(request, phase, start, num_tokens, samples=True)


def test_the_shape_of_a_step_counts_computed_and_attended_tokens() -> None:
    rows = [row(Phase.DECODE, 9, 1), row(Phase.DECODE, 99, 1), row(Phase.PREFILL, 10, 4)]
    assert shape_of(ScheduledStep(0, rows)) == StepShape(
        num_rows=3,
        num_decodes=2,
        num_prefill_tokens=4,
        num_prefill_pairs=11 + 12 + 13 + 14,
        num_context_tokens=10 + 100,
        num_prefill_context=14,
    )


def test_recomputed_tokens_and_padding_count_as_prefill() -> None:
    shape = shape_of(ScheduledStep(0, [row(Phase.RECOMPUTE, 0, 8)], num_padded_tokens=5))
    assert (shape.num_tokens, shape.num_prefill_tokens, shape.num_prefills) == (13, 13, 1)
