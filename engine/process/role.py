"""`EngineRole`: what an engine needs that only prefills or only decodes (`--role`)."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.engine.handover.decode_link import DecodeLink
from stepscope.engine.handover.hand_over import HandOver
from stepscope.engine.handover.shared_memory import SharedMemoryReceiver, SharedMemorySender, sweep
from stepscope.engine.loop.core import EngineCore
from stepscope.engine.loop.delivery import OtherEngine
from stepscope.engine.protocol.settings.engine_config import EngineConfig
from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.engine.scheduling.kv_memory import free_host_bytes, memory_bytes
from stepscope.engine.scheduling.step import KVReceiver
from stepscope.engine.transport.endpoints import Endpoint

if TYPE_CHECKING:
    from stepscope.engine.execution.runner import ModelRunner

_LONGEST_REQUESTS = 2  # number of longest requests that `transfer_memory=auto` has room for


class EngineRole:
    """The objects that hand requests over. All are None for an engine that does both."""

    def __init__(self, config: EngineConfig, link: DecodeLink | None) -> None:
        self.receiver: KVReceiver | None = None  # loads keys and values; only in a decode engine
        # Makes the link to the decode engine; only in a prefill engine.
        self.other_engine: Callable[[EngineCore], OtherEngine] | None = None
        self.name = None if config.role == "both" else config.role
        # Name of the engine to which a prefill engine hands requests over.
        self.decode_engine = None if link is None else link.engine
        # Identifies the model and its KV shape; None if nothing is handed over.
        self.kv_layout: str | None = None
        self._config = config
        self._link = link
        self._sender: SharedMemorySender | None = None

    def load(self, runner: "ModelRunner") -> None:
        """Make what needs the loaded model. Raises ConfigError for another model or no memory."""
        config = self._config
        if self.name is None:
            return
        frames = runner.kv_frames(_weights_of(config.model))
        self.kv_layout = frames.layout
        if self._link is None:
            self.receiver = SharedMemoryReceiver(frames, config.block_size)
            return
        self._link.check_layout(frames.layout)
        least = -(-runner.max_model_len // config.block_size)
        num_frames, size = _LONGEST_REQUESTS * least, config.transfer_memory
        if size != "auto":
            num_frames = memory_bytes("transfer_memory", size) // frames.frame_bytes
        if num_frames < least:
            raise ConfigError(
                "transfer_memory",
                f"transfer_memory={size} does not hold one request of "
                f"max_model_len={runner.max_model_len} tokens, which takes "
                f"{least * frames.frame_bytes / 1e6:,.0f} MB: raise it, or lower max_model_len",
            )
        num_mb, free_mb = num_frames * frames.frame_bytes / 1e6, free_host_bytes() / 1e6
        if num_mb > free_mb:  # allocating it would make the system kill a process
            raise ConfigError(
                "transfer_memory",
                f"{num_mb:,.0f} MB of transfer memory do not fit into the {free_mb:,.0f} MB that "
                "are free: lower transfer_memory or max_model_len",
            )
        self._sender = SharedMemorySender(frames, num_frames)
        self.other_engine = partial(
            HandOver, link=self._link, sender=self._sender, seed_of=runner.seed_of
        )

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        if self._sender is not None:
            self._sender.close()


@contextlib.contextmanager
def open_role(config: EngineConfig, name: str) -> Iterator[EngineRole]:
    """Prepare the engine's role: connect a prefill engine to its decode engine. A context manager.

    Enter it before loading the model, which takes minutes.

    Raises ConfigError: a prefill engine cannot reach its decode engine.
    """
    sweep()
    link = None
    if config.role == "prefill":
        link = DecodeLink(Endpoint.parse(config.decode_to), name)
        link.connect()
    role = EngineRole(config, link)
    try:
        yield role
    finally:
        role.close()


def _weights_of(model: str) -> str:
    """Return a name for the weights that all engines on this machine would use for them."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model
