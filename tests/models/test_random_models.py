"""Models of real shapes with random weights, `random:NAME`."""

from pathlib import Path

import pytest
import torch

from stepscope.engine.models import checkpoint, loader
from stepscope.engine.models.made_checkpoints import SHAPES
from stepscope.engine.models.weights import RandomWeights
from stepscope.engine.process.serve import open_engine
from stepscope.engine.protocol.engine_config import EngineConfig
from stepscope.engine.protocol.knobs import ConfigError, Knobs


def test_random_weights_are_equal_every_time_and_in_every_dtype() -> None:
    def draw(name: str, dtype: torch.dtype) -> torch.Tensor:
        weights = RandomWeights(torch.device("cpu"))
        weights.check({name: (8, 16)})
        return weights.read(name, dtype)

    name = "model.layers.0.mlp.up_proj.weight"
    first = draw(name, torch.float32)
    assert torch.equal(first, draw(name, torch.float32))
    assert torch.equal(first, draw(name, torch.bfloat16).float())
    assert not torch.equal(first, draw(name.replace("up", "gate"), torch.float32))
    assert float(first.std()) == pytest.approx(16**-0.5, rel=0.3)


def test_a_random_model_is_served_like_any_other_and_named_as_random(
    runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(runtime_folder))
    config = EngineConfig(
        model="random:llama-tiny", device="cpu", max_model_len=64, kv_memory="4MB"
    )
    with open_engine(config, Knobs(), progress=lambda what, share: None) as (core, intake):
        assert core.info.model == "random:llama-tiny"
        assert core.info.architecture == "LlamaForCausalLM"
        assert intake.vocab_size == SHAPES["llama-tiny"]["vocab_size"]
    with pytest.raises(ConfigError, match=r"no random model is called 'gpt'; there are: qwen3-0"):
        checkpoint.locate("random:gpt", lambda what, share: None)
    folder = checkpoint.locate("random:llama-tiny", lambda what, share: None)
    which = (folder, "random:llama-tiny", loader.load_config(folder, "x"), "transformers", 64)
    how = (torch.float32, torch.device("cpu"), lambda what, share: None)
    with pytest.raises(ConfigError, match="no weights for transformers to read"):
        loader.load_model(*which, *how)
