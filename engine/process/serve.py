"""The engine process: builds the engine's objects, serves until it is stopped, cleans up."""

import contextlib
import gc
import logging
import os
import re
import secrets
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING

import msgspec

from stepscope.engine.control.intake import Intake
from stepscope.engine.control.server import ControlServer
from stepscope.engine.execution.environment import prepare_environment
from stepscope.engine.handover.hand_over import EngineRole
from stepscope.engine.loop.audit import ControlTally
from stepscope.engine.loop.core import EngineCore
from stepscope.engine.loop.inbox import Call, Inbox, Refusal, SilentClient
from stepscope.engine.models import checkpoint
from stepscope.engine.protocol.commands import Shutdown, Submit
from stepscope.engine.protocol.engine_config import EngineConfig
from stepscope.engine.protocol.knobs import (
    ConfigError,
    Knobs,
    Limits,
    WrongValue,
    knob_specs,
)
from stepscope.engine.protocol.wire import EngineInfo
from stepscope.engine.scheduling.kv_cache import KVCacheManager, PrefixHashes
from stepscope.engine.scheduling.kv_memory import kv_memory_bytes, memory_bytes
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.telemetry.heartbeat import anchored
from stepscope.engine.telemetry.publisher import Publisher
from stepscope.engine.telemetry.step_watcher import StepWatcher
from stepscope.engine.telemetry.token_publisher import TokenPublisher
from stepscope.engine.transport.endpoints import Endpoint, EndpointLock, check_name, free_name
from stepscope.engine.transport.gate import gate_of
from stepscope.engine.transport.local_engines import sweep
from stepscope.engine.transport.rate_limit import allow_many_files
from stepscope.engine.workload.load import WorkloadDriver

if TYPE_CHECKING:
    from stepscope.engine.execution.runner import ModelRunner

log = logging.getLogger("stepscope.engine")


def serve(
    config: EngineConfig,
    knobs: Knobs,
    *,
    progress: Callable[[str, float], None],
    ready: Callable[[EngineInfo], None],
    http_endpoint: str | None = None,
) -> None:
    """Load the model and serve it until Shutdown, SIGINT, SIGTERM or SIGHUP.

    `http_endpoint`: HOST:PORT where the caller serves HTTP; published for observers.

    Raises ConfigError: why the engine cannot start, or go on without its device, in one line.
    """
    opened = open_engine(config, knobs, progress=progress, http_endpoint=http_endpoint)
    with opened as (core, _), stop_signals(core):
        ready(core.info)
        log.info("serving %s on %s", core.info.model, core.info.control_endpoint)
        core.run()


@contextlib.contextmanager
def open_engine(
    config: EngineConfig,
    knobs: Knobs,
    *,
    progress: Callable[[str, float], None],
    http_endpoint: str | None = None,
) -> Iterator[tuple[EngineCore, Intake]]:
    """Load a model and open an engine's sockets; a context manager. May raise ConfigError.

    Yields the engine, whose loop the caller runs (`core.run()`), and its intake.
    """
    if config.name:
        check_name(config.name)
    check_settings(config, knobs)
    name = config.name or (free_name() if not config.endpoint else "")
    endpoint = Endpoint.parse(config.endpoint or name)
    replay_bytes = memory_bytes("replay_memory", config.replay_memory)
    prepare_environment(config)
    sweep()
    allow_many_files()  # for connections
    with (
        gate_of(config.keys, endpoint) as gate,
        EndpointLock(endpoint, gate and gate.local, name or endpoint.name),
        contextlib.closing(EngineRole(config, name or endpoint.name)) as role,
        contextlib.ExitStack() as stack,
    ):
        # The import of torch takes seconds: report a wrong name before.
        checkpoint.locate(config.model, progress)
        # Imported here, after `prepare_environment`: it imports torch, which reads the environment.
        from stepscope.engine.execution.loading import load_runner

        def check_length(max_model_len: int) -> None:
            knobs.check(limits_of(config, knobs, max_model_len))

        runner = load_runner(config, progress, check_length)
        limits = limits_of(config, knobs, runner.max_model_len)
        # The model and the libraries stay for good. Frozen, the garbage collector skips them;
        # otherwise a collection takes milliseconds.
        gc.collect()
        gc.freeze()
        gc.set_threshold(700)  # short collections, whatever the command has set
        role.load(runner.kv_frames, runner.max_model_len, runner.seed_of)
        kv = KVCacheManager(runner.num_blocks, config.block_size)
        scheduler = Scheduler(kv, knobs, limits, receiver=role.receiver)
        if config.telemetry:
            kv.judge_prompts(runner.clock)
        if config.prefix_hashes and config.telemetry:
            scheduler.prefix_hashes = PrefixHashes(scheduler.kv, secrets.token_bytes(16))
        try:
            publisher = Publisher(endpoint.telemetry, config.replay_steps, replay_bytes, gate)
        except MemoryError as error:
            kept = f"replay_steps={config.replay_steps}, replay_memory={config.replay_memory}"
            raise ConfigError("bad_config", f"no memory for {kept}: ask for less") from error
        # The publisher's thread uses a socket of the gate's context, so it must end first.
        stack.callback(publisher.close)
        tokenizer, longest = runner.tokenizer, limits.max_model_len
        intake = Intake(tokenizer, runner.vocab_size, longest, with_tokens=config.with_tokens)
        inbox: Inbox = Inbox()
        workload = WorkloadDriver(
            workload_submit(inbox, intake, runner.clock),
            chars_per_token=tokenizer.chars_per_token,
            max_model_len=longest,
            num_unfinished=lambda: core.num_unfinished + inbox.qsize(),
        )
        with_tokens = config.with_tokens and config.telemetry
        core = EngineCore(
            _info(config, name or endpoint.name, endpoint, limits, runner, role, http_endpoint),
            runner,
            scheduler,
            publisher if config.telemetry else None,
            runner.eos_token_ids,
            config.max_waiting,
            overlap=config.overlaps(launch_blocks=runner.launch_blocks),
            inbox=inbox,
            workload=None if config.role == "decode" else workload,
            token_publisher=TokenPublisher(tokenizer.text_stream) if with_tokens else None,
            control_tally=ControlTally(gate),
            anchor=anchored,
            other_engine=role.other_engine,
        )
        where, replay = endpoint.control, publisher.replay
        control = ControlServer(where, core, intake, tokenizer, replay, gate)
        control.start()
        if config.telemetry:
            watcher = StepWatcher(core, publisher.publish_aside, core.clock)
            stack.callback(watcher.close)
            watcher.start()
        try:
            yield core, intake
        finally:
            workload.set(None)
            control.close()


def _info(
    config: EngineConfig,
    name: str,
    endpoint: Endpoint,
    limits: Limits,
    runner: "ModelRunner",
    role: EngineRole,
    http_endpoint: str | None,
) -> EngineInfo:
    return EngineInfo(
        engine_id=uuid.uuid4().hex,
        name=name,
        software_version=version("stepscope"),
        pid=os.getpid(),
        **runner.description,
        block_size=config.block_size,
        num_blocks=runner.num_blocks,
        **msgspec.structs.asdict(limits),
        chars_per_token=runner.tokenizer.chars_per_token,
        knobs=knob_specs(limits),
        telemetry_endpoint=endpoint.telemetry if config.telemetry else "",
        control_endpoint=endpoint.control,
        http_endpoint=http_endpoint,
        monotonic_ns=time.monotonic_ns(),
        wall_ns=time.time_ns(),
        with_tokens=config.with_tokens,
        config_hash=config.hash(),
        overlap=config.overlaps(launch_blocks=runner.launch_blocks),
        step_costs=runner.step_costs,
        bundles=True,
        keeps_snapshots=config.telemetry,
        role=role.name,
        decode_engine=role.decode_engine,
        kv_layout=role.kv_layout,
        slo_ttft_ms=config.slo_ttft_ms,
        slo_itl_ms=config.slo_itl_ms,
    )


def workload_submit(
    inbox: Inbox, intake: Intake, clock: Callable[[], int]
) -> Callable[[Submit], None]:
    """Return a function that submits one request of the workload the engine sends to itself."""
    silent = SilentClient()

    def submit(command: Submit) -> None:
        try:
            inbox.put(intake.call(command, silent, clock))
        except ConfigError as error:
            inbox.put(Refusal(command.client_id, str(error)))

    return submit


@contextlib.contextmanager
def stop_signals(core: EngineCore) -> Iterator[None]:
    """While entered, the first SIGINT, SIGTERM or SIGHUP stops the engine, a second kills it."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in signals}

    def stop(number: int, frame: object) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_DFL)
        # A SimpleQueue may be filled from a signal handler.
        core.inbox.put(Call(Shutdown(who="a signal"), SilentClient()))

    for number in signals:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


MIN_TOKEN_CAPACITY = 8192
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def check_settings(config: EngineConfig, knobs: Knobs) -> None:
    """Check what needs no model, before minutes of loading. Raises WrongValue."""
    kv_memory_bytes(config.kv_memory, sys.maxsize)
    memory_bytes("replay_memory", config.replay_memory)
    if config.transfer_memory != "auto":
        memory_bytes("transfer_memory", config.transfer_memory)
    if config.role == "prefill" and not config.decode_to:
        what = "role=prefill needs the engine that decodes: --decode-to NAME or ADDRESS"
        raise WrongValue("role", what)
    if config.role != "prefill" and config.decode_to:
        raise WrongValue("role", f"decode_to needs role=prefill, this engine is {config.role}")
    if not _DEVICE.fullmatch(config.device):
        raise WrongValue("device", f"device is auto, cpu, cuda or cuda:N, not {config.device!r}")
    for knob, name in (("max_num_batched_tokens", "token"), ("max_num_seqs", "seq")):
        value, bound = getattr(knobs, knob), getattr(config, f"{name}_capacity")
        if bound and value > bound:
            advice = f"raise --{name}-capacity, or lower the knob"
            what = f"{knob}={value} is above {name}_capacity={bound}: {advice}"
            raise WrongValue("out_of_bounds", what)
    if config.max_model_len:
        try:
            knobs.check(limits_of(config, knobs, config.max_model_len))
        except ConfigError as error:
            raise WrongValue(error.code, str(error)) from None


def limits_of(config: EngineConfig, knobs: Knobs, max_model_len: int) -> Limits:
    """Return the bounds of the knobs; requests have at most `max_model_len` tokens."""
    return Limits(
        max_num_batched_tokens=config.token_capacity
        or max(MIN_TOKEN_CAPACITY, max_model_len, knobs.max_num_batched_tokens),
        max_num_seqs=config.seq_capacity,
        max_model_len=max_model_len,
    )
