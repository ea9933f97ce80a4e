"""Finding, checking and loading models: what works, and a one-line error for what does not."""

import json
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stepscope.engine.execution.environment import num_threads, prepare_environment
from stepscope.engine.execution.loading import load_runner
from stepscope.engine.execution.runner import ModelRunner
from stepscope.engine.execution.step_costs import trial_step
from stepscope.engine.models import checkpoint, loader
from stepscope.engine.models.made_checkpoints import (
    DEMO_VERSION,
    EOS_TOKEN_ID,
    MAX_MODEL_LEN,
    ensure_demo,
)
from stepscope.engine.models.model_config import longest_request
from stepscope.engine.models.transformers_model import Probe, attention
from stepscope.engine.protocol.engine_config import EngineConfig
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import Phase
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.step import ScheduledRow, ScheduledStep
from tests.support.engines.tiny_runner import next_row, run_rows


def quiet(what: str, share: float) -> None:
    return


def load(model: Path | str, **config: object) -> ModelRunner:
    settings = {"model": str(model), "kv_memory": "4MB", "device": "cpu", "threads": 1, **config}
    return load_runner(EngineConfig(**settings), quiet)  # type: ignore[arg-type]


def refusal(call: Callable[[], object]) -> str:
    """The one-line error shown to the user."""
    with pytest.raises(ConfigError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert message
    return message


@pytest.fixture
def folder(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a checkpoint, to be damaged."""
    return Path(shutil.copytree(tiny_checkpoint("qwen3"), tmp_path / "model"))


# --- damaged and missing checkpoints


def test_a_model_that_is_missing_says_how_to_fetch_it(tmp_path: Path) -> None:
    assert "there is no folder" in refusal(lambda: load(tmp_path / "nothing"))
    message = refusal(lambda: load("nobody/such-model-1b"))
    assert "hf download nobody/such-model-1b" in message
    assert "--model demo" in message
    assert "neither a folder" in refusal(lambda: load("not a name!"))


def test_a_model_in_the_hugging_face_cache_is_found_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    cached = tmp_path / "models--some--tiny"
    shutil.copytree(tiny_checkpoint("llama"), cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert load("some/tiny").description["model"] == "some/tiny"


WEIGHTS = "model.safetensors"


def lose_one_of_two(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / checkpoint.INDEX).write_text(json.dumps({"weight_map": names}))


def cut_to(num_bytes: int) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / WEIGHTS, num_bytes)


def damage_header(folder: Path) -> None:
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[8:12] = b"\xff\xff\xff\xff"
    (folder / WEIGHTS).write_bytes(content)


def lose_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def change_a_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 80}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json"),
        (lambda folder: (folder / "config.json").write_text(""), "config.json"),
        (lambda folder: (folder / WEIGHTS).unlink(), r"has no weights \(\*.safetensors\)"),
        (
            lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"),
            "pytorch_model.bin is of another format",
        ),
        (lose_one_of_two, r"lacks 1 of 2 weight files \(first: model-00002-of-00002.safetensors"),
        (cut_to(0), "model.safetensors.*copy it again"),
        (cut_to(5), "model.safetensors.*copy it again"),
        (cut_to(100), "model.safetensors.*copy it again"),
        (cut_to(50_000), "model.safetensors.*copy it again"),
        (damage_header, "is damaged, or cut short"),
        (
            lambda folder: shutil.copy(folder / WEIGHTS, folder / "older.safetensors"),
            "model.safetensors and older.safetensors both hold",
        ),
        (lose_a_tensor, r"lack 1 tensors \(first: model.layers.1.mlp.up_proj.weight\)"),
        (
            change_a_shape,
            "6 weights of model are not of the shape its config says.*"
            r"mlp.down_proj.weight is \[64, 96\], not \[64, 80\]",
        ),
        (
            lambda folder: [each.unlink() for each in folder.glob("tokenizer*.json")],
            "has no tokenizer",
        ),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer in"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_line(
    folder: Path, damage: Callable[[Path], object], said: str
) -> None:
    damage(folder)
    assert re.search(said, refusal(lambda: load(folder)))


# --- models that cannot be served exactly


def config_folder(tmp_path: Path, config: dict[str, object]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "no-such-model"}, "knows no model_type 'no-such-model'"),
        ({}, "knows no model_type None"),
        ({"model_type": "x", "auto_map": {"AutoConfig": "x.Y"}}, "needs Python code"),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "deepseek_v3"}, "MLA"),
        ({"model_type": "qwen3_next"}, "linear_attention"),
        ({"model_type": "gemma3n_text"}, "share keys and values"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "both directions"),
        ({"model_type": "vit"}, "no causal language model"),
        (
            {
                "model_type": "qwen2",
                "rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]},
            },
            "M-RoPE",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_architectures_are_refused_with_the_reason(
    tmp_path: Path, config: dict[str, object], reason: str
) -> None:
    folder = config_folder(tmp_path, config)
    message = refusal(lambda: loader.load_config(folder, "it"))
    assert reason in message
    assert message.startswith("it ")


def test_a_model_without_the_attention_interface_is_refused(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, {"model_type": "bloom"})
    config = loader.load_config(folder, "it")
    device = torch.device("cpu")
    message = refusal(
        lambda: loader.load_model(folder, "it", config, "auto", 64, torch.float32, device, quiet)
    )
    assert "does not attend through the library's attention interface" in message


def test_a_layer_whose_attention_ignores_its_sliding_window_is_refused(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    # This family applies its window in the mask alone, which paged attention never sees.
    folder = tiny_checkpoint("phimoe", sliding_window=16)
    assert "has a sliding window, but its attention ignores it" in refusal(lambda: load(folder))


def test_a_model_that_fails_on_its_first_step_is_refused_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> object:
        raise RuntimeError("selected index k out of range\nand many lines more")

    monkeypatch.setattr("transformers.models.qwen3.modeling_qwen3.Qwen3MLP.forward", fail)
    message = refusal(lambda: load(folder, model_impl="transformers"))
    assert message == "model fails on a trial of six tokens: selected index k out of range"


@pytest.mark.parametrize(
    ("setting", "asked"),
    [
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"indices": torch.zeros(1)}, "indices"),
        ({"is_causal": False}, "is_causal"),
    ],
)
def test_attention_options_that_are_not_implemented_are_refused_not_ignored(
    setting: dict[str, object], asked: str
) -> None:
    layer = torch.nn.Identity()
    layer.layer_idx = 0
    states = torch.zeros(1, 2, 3, 8)

    def attend(mask: torch.Tensor | None = None, **options: object) -> None:
        attention(layer, states, states, states, mask, step_context=Probe(), **options)

    assert f"asks attention for {asked}" in refusal(lambda: attend(**setting))
    attend(dropout=0.0, use_cache=None)
    assert "attention_mask" in refusal(lambda: attend(torch.ones(3, 3)))


# --- how long a request may be


def rope(kind: str, **settings: object) -> dict[str, object]:
    return {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **settings}


def limit_of(tmp_path: Path, asked: int = 0, **config: object) -> int:
    folder = config_folder(tmp_path, {"model_type": "llama", **config})
    return longest_request(loader.load_config(folder, "it"), "it", asked)


def test_the_length_limit_is_the_models_maximum_or_a_lower_setting(tmp_path: Path) -> None:
    assert limit_of(tmp_path, max_position_embeddings=4096) == 4096
    assert limit_of(tmp_path, asked=1000, max_position_embeddings=4096) == 1000
    message = refusal(lambda: limit_of(tmp_path, asked=5000, max_position_embeddings=4096))
    assert "max_model_len=5000 is above 4096" in message


def test_with_length_dependent_rope_the_limit_is_where_the_dependence_begins(
    tmp_path: Path,
) -> None:
    dynamic = {"max_position_embeddings": 2048, "rope_parameters": rope("dynamic")}
    assert limit_of(tmp_path, **dynamic) == 2048
    long = {
        "max_position_embeddings": 8192,
        "rope_parameters": rope(
            "longrope",
            original_max_position_embeddings=1024,
            short_factor=[1.0] * 64,
            long_factor=[2.0] * 64,
        ),
    }
    assert limit_of(tmp_path, **long) == 1024
    refused = refusal(lambda: limit_of(tmp_path, asked=2000, **long))
    assert "'longrope' RoPE change with the batch" in refused


def test_scaled_positions_reach_as_far_as_vllm_lets_them(tmp_path: Path) -> None:
    linear = {"max_position_embeddings": 8192, "rope_parameters": rope("linear")}
    assert limit_of(tmp_path, **linear) == 32_768
    qwen = {"max_position_embeddings": 32_768, "rope_parameters": rope("yarn")}
    assert limit_of(tmp_path, **qwen) == 131_072
    original = rope("yarn", original_max_position_embeddings=4096)
    assert limit_of(tmp_path, max_position_embeddings=16_384, rope_parameters=original) == 16_384
    llama3 = rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0,
                  original_max_position_embeddings=8192)  # fmt: skip
    assert limit_of(tmp_path, max_position_embeddings=131_072, rope_parameters=llama3) == 131_072


# --- settings


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"device": "cuda:99"}, "device 'cuda:99' is not there.*--device cpu"),
        ({"device": "tpu"}, "device is auto, cpu, cuda or cuda:N"),
        ({"device": "meta"}, "device is auto, cpu, cuda or cuda:N"),
        ({"device": ""}, "device is auto, cpu, cuda or cuda:N"),
        ({"overlap": "on"}, "overlap: a CPU runs the model within the launch.*--overlap auto"),
        ({"attention": "warp"}, "there are: auto, flash-attn, triton, cpu, torch, reference"),
        ({"kv_memory": "64KB"}, "one request of max_model_len=512 tokens needs"),
    ],
)
def test_a_setting_that_does_not_fit_the_machine_or_the_model_is_refused(
    folder: Path, setting: dict[str, object], said: str
) -> None:
    assert re.search(said, refusal(lambda: load(folder, **setting)))


def test_environment_variables_are_set_but_never_overwritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    prepare_environment(EngineConfig(threads=3))
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert num_threads(EngineConfig()) >= 1


# --- what a loaded model says of itself


def test_loading_a_model_reports_its_progress(folder: Path) -> None:
    told: list[tuple[str, float]] = []
    config = EngineConfig(model=str(folder), kv_memory="4MB", device="cpu", threads=1)
    load_runner(config, lambda what, share: told.append((what, share)))
    assert "loading weights" in [what for what, _ in told]
    assert all(0 <= share <= 1 for _, share in told)
    assert told[-1] == ("ready", 1.0)


def test_a_loaded_model_reports_its_shape_its_size_and_its_limits(folder: Path) -> None:
    runner = load(folder, dtype="float32")
    description = runner.description
    assert description["model"] == "model"
    assert description["architecture"] == "Qwen3ForCausalLM"
    assert (description["dtype"], description["device"]) == ("float32", "cpu")
    shape = [description[name] for name in ("num_layers", "num_kv_heads", "head_dim")]
    assert shape == [2, 2, 32]
    embeddings = 2 * 260 * 64
    norm = 64
    norms = 2 * (2 * 64 + 2 * 32) + norm
    # Weights of products are bf16 in memory, the rest fp32.
    multiplied = description["num_parameters"] - embeddings // 2 - norms
    assert description["weight_bytes"] == 2 * multiplied + 4 * (embeddings // 2 + norms)
    assert description["flops_per_token"] == 2 * (description["num_parameters"] - embeddings - norm)
    assert runner.eos_token_ids == frozenset({256})
    assert runner.vocab_size == 260
    assert runner.max_model_len == 512
    assert runner.num_blocks == (4 << 20) // (2 * 2 * 2 * 32 * 16 * 4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "auto"])
def test_a_model_runs_in_other_precisions(tiny_checkpoint: Callable[..., Path], dtype: str) -> None:
    runner = load(tiny_checkpoint("llama"), dtype=dtype)
    request = Request(1, [5] * 20, SamplingParams(temperature=0.7, seed=3), arrival_ns=0)
    request.block_table = [4, 2]
    result = runner.execute(ScheduledStep(0, [ScheduledRow(request, Phase.PREFILL, 0, 20, True)]))
    (token_id,) = result.token_ids
    assert 0 <= token_id < runner.vocab_size
    assert result.launch_ns <= result.tokens_ns <= runner.clock()
    assert result.device_ns is None


# --- the demo checkpoint


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(tmp_path / name))
    return tmp_path / "stepscope"


def test_the_demo_model_is_created_once_and_served_like_any_other(cache: Path) -> None:
    runner = load("demo", kv_memory="64MB")
    written = (cache / DEMO_VERSION / "model.safetensors").stat().st_mtime_ns
    description = runner.description
    assert description["model"] == "demo"
    assert 19e6 < description["num_parameters"] < 21e6
    assert runner.max_model_len == MAX_MODEL_LEN
    assert runner.tokenizer.chars_per_token == 1.0
    assert runner.eos_token_ids == frozenset({EOS_TOKEN_ID})

    request = Request(1, runner.tokenizer.encode("Once upon a time"), SamplingParams(), 0)
    request.block_table = [3, 1, 2, 7, 5]
    for _ in range(48):
        run_rows(runner, [next_row(request, request.num_tokens)])
    text = runner.tokenizer.decode(request.output_token_ids)
    assert len(set(text)) > 10, f"it repeats itself: {text!r}"
    assert EOS_TOKEN_ID not in request.output_token_ids

    ensure_demo(quiet, checkpoint.check)
    assert (cache / DEMO_VERSION / "model.safetensors").stat().st_mtime_ns == written


def test_a_half_written_demo_model_is_created_again(cache: Path) -> None:
    folder = ensure_demo(quiet, checkpoint.check)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:1000])
    assert ensure_demo(quiet, checkpoint.check) == folder
    assert (folder / "model.safetensors").read_bytes() == weights
    assert [path.name for path in cache.iterdir()] == [DEMO_VERSION]


def test_several_engines_may_create_the_demo_model_at_once(cache: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        folders = list(threads.map(lambda _: ensure_demo(quiet, checkpoint.check), range(2)))
    assert folders == [cache / DEMO_VERSION] * 2
    checkpoint.check(folders[0])
    assert [path.name for path in cache.iterdir()] == [DEMO_VERSION]


def test_a_cache_folder_that_cannot_be_written_is_named(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    message = refusal(lambda: ensure_demo(quiet, checkpoint.check))
    assert str(cache) in message
    assert "XDG_CACHE_HOME" in message


def test_after_another_kv_pool_is_allocated_steps_name_only_its_blocks(folder: Path) -> None:
    """As on a GPU, where the pool of the trial steps may be the larger one."""
    runner = load(folder, dtype="float32", attention="torch", max_model_len=64)
    runner.execute(trial_step([(0, 60)] * 64, runner.num_blocks, runner.block_size))
    runner.allocate(8)
    requests = [Request(i, [1] * n, SamplingParams(), arrival_ns=0) for i, n in enumerate((60, 3))]
    for request, blocks in zip(requests, ([0, 1, 2, 3], [4]), strict=True):
        request.block_table = blocks
    for most in (59, 1):  # both as decodes, too, which share a gather
        run_rows(runner, [next_row(request, most) for request in requests])


# --- absurd configs

ABSURD: tuple[object, ...] = (0, -1, 1.5, "x", None, [], {}, [1], 1 << 40, True, float("nan"))
ROPES = [
    {"rope_type": kind, "rope_theta": 1e4, **changes}
    for kind in ("nonsense", "yarn", "linear", "dynamic", "default", None, 3)
    for changes in (
        {}, {"factor": 0}, {"factor": "x"}, {"factor": -2.0}, {"factor": float("nan")},
        {"factor": 2.0, "rope_theta": "x"}, {"factor": 2.0, "rope_theta": 0.0},
        {"factor": 4.0, "original_max_position_embeddings": "x"},
    )
]  # fmt: skip


@pytest.mark.parametrize(("family", "every"), [("llama", 2), ("gemma2", 6)])
def test_whatever_a_config_says_the_model_loads_or_is_refused_in_one_line(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, family: str, every: int
) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint(family), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    cases = [(key, value) for key in config for value in ABSURD]
    cases += [("rope_parameters", rope_) for rope_ in ROPES]
    refused: list[str] = []
    for key, value in cases[::every]:
        (folder / "config.json").write_text(json.dumps({**config, key: value}))
        try:
            given = loader.load_config(folder, "it")
            length = min(64, longest_request(given, "it", 0))
            device = torch.device("cpu")
            loader.load_model(folder, "it", given, "auto", length, torch.float32, device, quiet)
        except ConfigError as error:
            refused.append(str(error))
    assert len(refused) > 50 / every
    assert [each for each in refused if "\n" in each] == []
