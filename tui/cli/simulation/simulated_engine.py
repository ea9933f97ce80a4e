"""`stepscope simulated-engine`: the engine of `stepscope demo --simulate` and `tour --simulate`."""

from typing import Annotated, Any

import typer

from stepscope.engine.process.simulated import serve_simulated
from stepscope.engine.protocol.settings.knobs import Knobs, Limits
from stepscope.engine.simulation.virtual.session import SimulatedSetup
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.recordings.file.service_levels import LEVEL_NAMES
from stepscope.tui.cli.engines.engine import end_process, prepare_process, when_parent_ends
from stepscope.tui.cli.shared.options import command
from stepscope.tui.cli.simulation.runs import choose_step_times
from stepscope.tui.settings.setting_values import convert_flags
from stepscope.tui.settings.settings import DashboardSettings

BLOCK_SIZE = 16
_MAX_LEN = 32_768


@command(sections=("knobs", "levels"), hidden=True)
def run(
    endpoint: Annotated[str, typer.Option()],
    gpu: Annotated[str | None, typer.Option()] = None,
    step_time: Annotated[str | None, typer.Option()] = None,
    model: Annotated[str | None, typer.Option()] = None,
    num_blocks: Annotated[int | None, typer.Option()] = None,
    speed: Annotated[float, typer.Option()] = 1.0,
    exit_with_stdin: Annotated[bool, typer.Option("--exit-with-stdin")] = False,
    *,
    flags: dict[str, Any],
) -> None:
    """The engine of 'stepscope demo --simulate' and 'stepscope tour --simulate'."""
    prepare_process()
    knobs = {name: text for name, text in flags.items() if name not in LEVEL_NAMES}
    levels = {name: text for name, text in flags.items() if name in LEVEL_NAMES}
    levels = convert_flags(DashboardSettings, levels)
    if exit_with_stdin:
        when_parent_ends(end_process)
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
        knobs=Knobs(**convert_flags(Knobs, knobs)),
        limits=Limits(
            max_num_batched_tokens=max(8192, longest), max_num_seqs=256, max_model_len=longest
        ),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        **levels,
    )
    serve_simulated(setup, Endpoint.parse(endpoint), speed, 0, lambda info: None)
