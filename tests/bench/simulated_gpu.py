"""`setup`: an H100 with an 8B model by roofline, for the benches that simulate."""

from stepscope.engine.protocol.settings.knobs import Knobs, Limits
from stepscope.engine.simulation.model_shape import model_shape
from stepscope.engine.simulation.roofline import RooflineModel, gpu_named, num_kv_tokens
from stepscope.engine.simulation.virtual.session import SimulatedSetup


def setup(knobs: Knobs) -> SimulatedSetup:
    gpu, shape = gpu_named("h100"), model_shape("llama-3.1-8b")
    return SimulatedSetup(
        model=RooflineModel(gpu, shape),
        simulated="bench",
        model_name=shape.name,
        device=gpu.name,
        knobs=knobs,
        limits=Limits(max_num_batched_tokens=8192, max_num_seqs=256, max_model_len=8192),
        num_blocks=num_kv_tokens(gpu, shape) // 16,
        block_size=16,
    )
