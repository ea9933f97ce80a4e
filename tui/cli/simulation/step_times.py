"""Chooses a model of step times: a GPU's data sheet, measured points, or a fit on a recording."""

from pathlib import Path
from typing import NamedTuple

import msgspec

from stepscope.engine.simulation.fitted import FittedModel
from stepscope.engine.simulation.gpus import gpu_named
from stepscope.engine.simulation.measured import MeasuredModel, read_points
from stepscope.engine.simulation.model_shape import model_shape
from stepscope.engine.simulation.roofline import RooflineModel, num_kv_tokens
from stepscope.engine.simulation.step_time import StepTimeModel
from stepscope.recordings.file.mcap.format import PART_SUFFIX
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.simulation.fitting import fit_recording
from stepscope.tui.cli.shared.recording_path import find_recording
from stepscope.tui.settings.cli_errors import WrongUsage

DEFAULT_MODEL = "llama-3.1-8b"


class ChosenStepTimes(NamedTuple):
    """A model of step times, and what is known of the engine whose step times it models."""

    model: StepTimeModel
    simulated: str  # a description in a few words
    model_name: str
    device: str
    num_kv_tokens: int | None  # room for tokens in the KV cache; None if unknown


def choose_step_times(
    gpu: str | None, model: str | None, step_time: str | None, tensor_parallel: int
) -> ChosenStepTimes:
    """Return the model that `--gpu`, `--model`, `--step-time` and `--tensor-parallel` ask for.

    Raises:
        WrongUsage: neither or both of `--gpu` and `--step-time` are given.
        ConfigError: the GPU or the model is unknown, or the file has no valid points.
    """
    if (gpu is None) == (step_time is None):
        raise WrongUsage("give either --gpu (such as h100) or --step-time (a file or a recording)")
    if gpu is not None:
        rates, shape = gpu_named(gpu), model_shape(model or DEFAULT_MODEL)
        roofline = RooflineModel(rates, shape, tensor_parallel)
        kv_tokens = num_kv_tokens(rates, shape, tensor_parallel)
        return ChosenStepTimes(
            roofline, f"{roofline.name}, by roofline", shape.name, rates.name, kv_tokens
        )
    assert step_time is not None
    return _of_file(step_time, model)


def _of_file(file: str, model: str | None) -> ChosenStepTimes:
    path = Path(file)
    if path.suffix in (".mcap", PART_SUFFIX) or not path.exists():
        return _of_recording(find_recording(file))
    try:
        fitted = msgspec.json.decode(path.read_bytes(), type=FittedModel)
    except (UnicodeDecodeError, msgspec.DecodeError):
        points = MeasuredModel(read_points(path, model))
        text = f"measured points of {path.name}"
        return ChosenStepTimes(points, text, model or "unknown", "unknown", None)
    return ChosenStepTimes(fitted, f"fit in {path.name}", model or "unknown", "unknown", None)


def _of_recording(path: Path) -> ChosenStepTimes:
    with Recording(path) as recording:
        info = recording.info
        fitted = fit_recording(recording)
    kv_tokens = info.num_blocks and info.block_size and info.num_blocks * info.block_size
    return ChosenStepTimes(
        fitted, f"fit on {path.name}", info.model, info.device or "unknown", kv_tokens
    )
