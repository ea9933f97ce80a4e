"""`stepscope simulated-engine`: the engine that `stepscope demo --simulate` starts."""

import threading

from stepscope.engine.process.simulated import serve_simulated
from stepscope.engine.protocol.settings.knobs import Knobs, Limits
from stepscope.engine.simulation.virtual.setup import SimulatedSetup
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.tui.cli.engines.engine import prepare_process
from stepscope.tui.cli.engines.serve import end_with_stdin
from stepscope.tui.cli.simulation.step_times import choose_step_times

BLOCK_SIZE = 16
_MAX_LEN = 32_768


def run(endpoint: str, gpu: str, model: str | None, speed: float, exit_with_stdin: bool) -> None:
    """Run a simulated engine until a signal or a `Shutdown` command ends it.

    Raises:
        ConfigError: the GPU or the model is unknown, or the endpoint cannot be bound.
    """
    prepare_process()
    if exit_with_stdin:
        threading.Thread(target=end_with_stdin, name="parent-watch", daemon=True).start()
    chosen = choose_step_times(gpu, model, None, 1)
    assert chosen.num_kv_tokens is not None
    num_blocks = chosen.num_kv_tokens // BLOCK_SIZE
    longest = min(_MAX_LEN, num_blocks * BLOCK_SIZE)
    setup = SimulatedSetup(
        model=chosen.model,
        simulated=chosen.simulated,
        model_name=chosen.model_name,
        device=chosen.device,
        knobs=Knobs(),
        limits=Limits(
            max_num_batched_tokens=max(8192, longest), max_num_seqs=256, max_model_len=longest
        ),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
    )
    serve_simulated(setup, Endpoint.parse(endpoint), speed, 0, lambda info: None)
