"""`stepscope serve`: runs an engine in this process, and an HTTP server in a child if asked to.

The parent holds the listening socket. So the port stays the same when the child is restarted, and
connections wait meanwhile. Settings are passed in the environment, because other users can see the
arguments of a process, and the API key is secret.
"""

import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from stepscope.engine.http.settings import Address, HttpSettings, check_private, parse_address
from stepscope.engine.models import smollm2
from stepscope.engine.protocol.engine_config import EngineConfig
from stepscope.engine.protocol.knobs import ConfigError, Knobs
from stepscope.engine.protocol.wire import EngineInfo
from stepscope.engine.scheduling.presets import defaults_like
from stepscope.engine.transport.endpoints import Endpoint, runtime_dir
from stepscope.engine.transport.sockets import KEY_VARIABLE
from stepscope.engine.workload.arrivals import in_words
from stepscope.tui.cli.shared.connect import choose
from stepscope.tui.cli.shared.options import EngineName, Like, argument, command, option
from stepscope.tui.cli.shared.output import Progress, model_on_text, note, say
from stepscope.tui.cli.shared.process import (
    end_process,
    engine_packages,
    log_warnings,
    prepare_process,
    when_parent_ends,
)
from stepscope.tui.settings.cli_errors import WrongUsage
from stepscope.tui.settings.setting_values import flag_of, resolve
from stepscope.tui.settings.settings import environment_name, load_alerts
from stepscope.tui.settings.terminal import OURSELVES

_DEFAULTS = {"bind": "127.0.0.1:8000"}


@command(takes_key=True, sections=("http",), defaults=_DEFAULTS)
def serve_http_for(
    endpoint: EngineName = None,
    inherited: Annotated[int | None, typer.Option("--inherited-socket", hidden=True)] = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Serve the OpenAI API over HTTP for an engine; `serve` runs it as a child process."""
    settings = resolve(HttpSettings, "http", flags, _DEFAULTS)
    log_warnings()
    if inherited is not None:
        assert endpoint is not None
        parent_gone = threading.Event()
        when_parent_ends(parent_gone.set)
        _run(settings, Endpoint.parse(endpoint), socket.socket(fileno=inherited), parent_gone)
        return
    check_private(parse_address(settings.bind), settings.api_key)
    where = choose(endpoint, "stepscope serve --http-for {}")
    listener, text = _open_listener(settings)
    say(*announcement(text, settings))
    if where.is_ipc and not Path(where.control.removeprefix("ipc://")).exists():
        say(f"no engine runs at {where.control} yet; the server will use it once it starts")
    with listener:
        _run(settings, where, listener, None)


def _open_listener(settings: HttpSettings) -> tuple[socket.socket, str]:
    """Bind the listening socket; the HTTP server of a killed engine may have it for a while."""
    address = parse_address(settings.bind)
    check_private(address, settings.api_key)
    with engine_packages(needs_torch=False):
        from stepscope.engine.http.server import listen
    began_s = time.monotonic()
    while True:
        try:
            listener = listen(address)
            return listener, Address(*listener.getsockname()[:2]).text
        except ConfigError:
            if time.monotonic() - began_s > _LEAVING_S:
                raise
        time.sleep(_POLL_S)


def announcement(address: str, settings: HttpSettings, *, takes_prompts: bool = True) -> list[str]:
    if not takes_prompts:
        return [f"metrics on http://{address}/metrics; prompts go to the prefill engine"]
    key = ' -H "Authorization: Bearer $STEPSCOPE_HTTP_API_KEY"' if settings.api_key else ""
    return [
        f"OpenAI API on http://{address}/v1",
        f"try it: curl http://{address}/v1/completions{key} "
        """-d '{"prompt": "Once upon a time", "max_tokens": 32}'""",
    ]


def _run(
    settings: HttpSettings,
    endpoint: Endpoint,
    listener: socket.socket,
    parent_gone: threading.Event | None,
) -> None:
    with engine_packages(needs_torch=False):
        from stepscope.engine.http.server import run_until_signal, serve_http
    from stepscope.tui.cli.engines.watch import judged_rules

    names: set[str] = set()

    def found(info: EngineInfo) -> None:
        if parent_gone is None and info.engine_id not in names:
            names.add(info.engine_id)
            say(f"serving {info.model} of {info.name}")

    with judged_rules(endpoint, load_alerts()) as gauges:
        serving = serve_http(settings, endpoint, listener, parent_gone, found, gauges)
        run_until_signal(serving)


_PAUSE_S = 0.5  # before a child that ended is started again
_STOP_S = 8.0
_LEAVING_S = 3.0  # how long the HTTP server of a killed engine may hold the port
_POLL_S = 0.1


class HttpProcess:
    """The HTTP server of an engine. Its port is bound at once, its child runs from `start` on."""

    def __init__(self, settings: HttpSettings) -> None:
        self._settings = settings
        self._endpoint = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._listener, self.address = _open_listener(settings)

    def start(self, endpoint: str, *, takes_prompts: bool = True) -> None:
        """Start the child; a decode engine takes no prompts, which go to the prefill engine."""
        self._endpoint = endpoint
        say(*announcement(self.address, self._settings, takes_prompts=takes_prompts))
        self._thread.start()

    def stop(self) -> None:
        with self._lock:
            self._stopping.set()
            process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._thread.ident is not None:
            self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            problem = self._run_once()
            if not self._stopping.is_set():
                note(f"{problem}; starting it again in {_PAUSE_S:g} s", "")
                self._stopping.wait(_PAUSE_S)

    def _run_once(self) -> str:
        descriptor = self._listener.fileno()
        arguments = ["http", self._endpoint, "--inherited-socket", str(descriptor)]
        values = msgspec.structs.asdict(self._settings)
        settings = {environment_name("http", name): str(value) for name, value in values.items()}
        try:
            with self._lock:
                if self._stopping.is_set():
                    return ""
                self._process = subprocess.Popen(
                    [*OURSELVES, *arguments],
                    stdin=subprocess.PIPE,  # closes when we are gone
                    stdout=subprocess.DEVNULL,
                    pass_fds=[descriptor],
                    start_new_session=True,  # Ctrl-C goes to us, not to the child
                    env={**os.environ, KEY_VARIABLE: "", **settings},
                )
        except OSError as error:
            return f"the HTTP server did not start: {error}"
        exit_code = self._process.wait()
        how = f"by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"with {exit_code}"
        return f"the HTTP server (pid {self._process.pid}) ended {how}"


_TELLS_ALL = "--with-tokens: everyone who watches or records it gets prompts and outputs"


@command(
    "stepscope serve demo --max-num-batched-tokens 512",
    "stepscope serve --http 127.0.0.1:8000",
    "stepscope serve --http-for engine-0",
    "stepscope serve --like vllm",
    takes_key=True,
    sections=("serve", "knobs", "http"),
)
def serve(
    served: str | None = argument("MODEL", "the same as --model"),
    exit_with_stdin: Annotated[bool, typer.Option("--exit-with-stdin", hidden=True)] = False,
    like: Like = None,
    http_for: str | None = option(
        "ENDPOINT",
        "run no engine: serve the OpenAI API for this one, now or later, at --http",
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
    preset = defaults_like(like) if like else None
    config = resolve(EngineConfig, "serve", flags, preset and preset.engine)
    knobs = resolve(Knobs, "knobs", flags, preset and preset.knobs)
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
        endpoint = Endpoint.parse(info.control_endpoint)
        has_name = endpoint.path == runtime_dir() / info.name
        where = info.name if has_name else endpoint.here.control
        say(
            *([smollm2.NOTICE] if info.model == smollm2.NAME else []),
            f"{info.name} serves {model_on_text(info, *more)} on {info.control_endpoint}",
            *([] if info.step_costs is None else [in_words(info.step_costs)]),
            f"watch it: stepscope top {where}    stop it: Ctrl-C",
            *([_TELLS_ALL] if info.with_tokens else []),
        )
        if server is not None:
            server.start(endpoint.here.control, takes_prompts=info.role != "decode")

    try:
        with engine_packages(), progress:
            from stepscope.engine.process.serve import serve as run

            address = None if server is None else server.address
            run(config, knobs, progress=progress, ready=ready, http_endpoint=address)
    finally:
        if server is not None:
            server.stop()
