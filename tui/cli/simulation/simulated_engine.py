"""`stepscope simulated-engine`: the engine of `stepscope demo --simulate` and `tour --simulate`."""

import threading
from collections.abc import Mapping
from typing import Any

from stepscope.engine.process.simulated import serve_simulated
from stepscope.engine.protocol.settings.knobs import Knobs, Limits
from stepscope.engine.simulation.virtual.setup import SimulatedSetup
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.tui.cli.engines.engine import prepare_process
from stepscope.tui.cli.engines.serve import end_with_stdin
from stepscope.tui.cli.simulation.step_times import choose_step_times
from stepscope.tui.settings.setting_values import convert_flags

BLOCK_SIZE = 16
_MAX_LEN = 32_768


def run(
    endpoint: str,
    gpu: str | None,
    step_time: str | None,
    model: str | None,
    num_blocks: int | None,
    speed: float,
    exit_with_stdin: bool,
    levels: Mapping[str, float],
    flags: Mapping[str, Any],
) -> None:
    """Run a simulated engine until a signal or a `Shutdown` command ends it.

    Args:
        num_blocks: blocks of the KV cache; None: as many as the GPU has room for, or as in the
            recording.
        levels: service levels of the engine.
        flags: knobs as given on the command line.

    Raises:
        ConfigError: the GPU, the model or a knob is not valid, or the endpoint cannot be bound.
    """
    prepare_process()
    if exit_with_stdin:
        threading.Thread(target=end_with_stdin, name="parent-watch", daemon=True).start()
    chosen = choose_step_times(gpu, model, step_time, 1)
    if num_blocks is None:
        assert chosen.num_kv_tokens is not None
        num_blocks = chosen.num_kv_tokens // BLOCK_SIZE
    longest = min(_MAX_LEN, num_blocks * BLOCK_SIZE)
    setup = SimulatedSetup(
        model=chosen.model,
        simulated=chosen.simulated,
        model_name=chosen.model_name,
        device=chosen.device,
        knobs=Knobs(**convert_flags(Knobs, flags)),
        limits=Limits(
            max_num_batched_tokens=max(8192, longest), max_num_seqs=256, max_model_len=longest
        ),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        slo_ttft_ms=levels.get("slo_ttft_ms"),
        slo_itl_ms=levels.get("slo_itl_ms"),
    )
    serve_simulated(setup, Endpoint.parse(endpoint), speed, 0, lambda info: None)
