"""`stepscope simulated-engine`: the engine of `stepscope demo --simulate` and `tour --simulate`."""

from typing import Annotated, Any

import typer
from msgspec import structs

from stepscope.engine.process.simulated import serve_simulated
from stepscope.engine.protocol.settings.knobs import Knobs
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.recordings.file.service_levels import LEVEL_NAMES
from stepscope.tui.cli.engines.engine import end_process, prepare_process, when_parent_ends
from stepscope.tui.cli.shared.options import command
from stepscope.tui.cli.simulation.runs import EngineOptions, choose_step_times, setup_of
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
    engine = EngineOptions(
        gpu, model, step_time, num_blocks=num_blocks, block_size=BLOCK_SIZE, max_model_len=_MAX_LEN
    )
    chosen = choose_step_times(gpu, model, step_time, 1)
    setup = structs.replace(setup_of(engine, chosen, convert_flags(Knobs, knobs)), **levels)
    serve_simulated(setup, Endpoint.parse(endpoint), speed, 0, lambda info: None)
