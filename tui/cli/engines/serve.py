"""`stepscope serve`: runs an engine in this process, and an HTTP server beside it if asked to."""

from typing import Annotated, Any

import typer

from stepscope.engine.http.settings import HttpSettings
from stepscope.engine.models.cache import smollm2
from stepscope.engine.protocol.settings.engine_config import EngineConfig
from stepscope.engine.protocol.settings.knobs import Knobs
from stepscope.engine.protocol.wire import EngineInfo
from stepscope.engine.scheduling.presets import defaults_like
from stepscope.engine.transport.endpoints import Endpoint, runtime_dir
from stepscope.engine.workload.capacity import in_words
from stepscope.tui.cli.engines.engine import (
    end_process,
    engine_packages,
    model_on_text,
    prepare_process,
    when_parent_ends,
)
from stepscope.tui.cli.engines.http import HttpProcess, serve_http_for
from stepscope.tui.cli.shared.options import Like, argument, command, option
from stepscope.tui.cli.shared.output import Progress
from stepscope.tui.settings.cli_errors import WrongUsage
from stepscope.tui.settings.setting_values import flag_of, resolve


@command(
    "stepscope serve demo --max-num-batched-tokens 512",
    "stepscope serve --http 127.0.0.1:8000",
    "stepscope serve --http-for engine-0",
    "stepscope serve --like vllm",
    takes_key=True,
    sections=("serve", "knobs", "http"),
    names={"bind": "--http"},
)
def serve(
    served: str | None = argument("MODEL", "the same as --model"),
    exit_with_stdin: Annotated[bool, typer.Option("--exit-with-stdin", hidden=True)] = False,
    like: Like = None,
    http_for: str | None = option(
        "ENDPOINT",
        "run no engine: serve the OpenAI API for this one, now or later, at --http "
        "(default: 127.0.0.1:8000)",
    ),
    *,
    flags: dict[str, Any],
) -> None:
    """Run an engine, and publish every step of it.

    Every option is also a key of the config file (sections [serve], [knobs] and [http]) and a
    variable: STEPSCOPE_SERVE_MODEL, STEPSCOPE_KNOBS_ORDER, STEPSCOPE_HTTP_BIND (--http). Options
    override variables, and variables override the file.
    """
    if served is not None:
        if flags.get("model", served) != served:
            raise WrongUsage(f"MODEL {served} and --model {flags['model']}: give one of them")
        flags = {**flags, "model": served}
    if http_for is not None:
        if unused := sorted(flags.keys() - set(HttpSettings.__struct_fields__)):
            raise WrongUsage(f"{flag_of(unused[0])}: with --http-for no engine runs here")
        serve_http_for(http_for, flags=flags)
        return
    preset = None if like is None else defaults_like(like)
    config = resolve(EngineConfig, "serve", flags, None if preset is None else preset.engine)
    knobs = resolve(Knobs, "knobs", flags, None if preset is None else preset.knobs)
    settings = resolve(HttpSettings, "http", flags)
    prepare_process()
    if exit_with_stdin:
        when_parent_ends(end_process)
    # Bind before the model loads, so that an address in use is reported at once.
    server = HttpProcess(settings) if settings.bind else None
    progress = Progress()

    def ready(info: EngineInfo) -> None:
        progress.close()
        more = []
        if info.kv_cache_dtype != info.dtype:
            more.append(f"KV cache in {info.kv_cache_dtype}")
        if info.role is not None:
            more.append(f"prefill, then {info.decode_engine}" if info.decode_engine else info.role)
        if info.model == smollm2.NAME:
            print(smollm2.NOTICE, flush=True)
        serves = f"{info.name} serves {model_on_text(info, *more)}"
        print(f"{serves} on {info.control_endpoint}", flush=True)
        if info.step_costs is not None:
            print(in_words(info.step_costs), flush=True)
        endpoint = Endpoint.parse(info.control_endpoint)
        has_name = endpoint.path == runtime_dir() / info.name
        where = info.name if has_name else endpoint.here.control
        print(f"watch it: stepscope top {where}    stop it: Ctrl-C", flush=True)
        if info.with_tokens:
            said = "--with-tokens: everyone who watches or records it gets prompts and outputs"
            print(said, flush=True)
        if server is not None:
            server.start(endpoint.here.control, takes_prompts=info.role != "decode")

    try:
        with engine_packages(), progress:
            from stepscope.engine.process.serve import serve as run

            run(
                config,
                knobs,
                progress=progress,
                ready=ready,
                http_endpoint=server.address if server is not None else None,
            )
    finally:
        if server is not None:
            server.stop()
