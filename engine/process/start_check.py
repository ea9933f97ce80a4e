"""Checks settings before anything is loaded, as far as that needs neither machine nor model."""

import re

from stepscope.engine.protocol.settings.engine_config import EngineConfig
from stepscope.engine.protocol.settings.knobs import ConfigError, Knobs, Limits, WrongValue
from stepscope.engine.scheduling.kv_memory import check_kv_memory, memory_bytes

MIN_TOKEN_CAPACITY = 8192
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def check_settings(config: EngineConfig, knobs: Knobs) -> None:
    """Check the settings. Call it first, because later checks come after minutes of loading.

    Raises WrongValue: a value has the wrong form, or two values do not go together.
    """
    check_kv_memory(config.kv_memory)
    memory_bytes("replay_memory", config.replay_memory)
    _check_role(config)
    if not _DEVICE.fullmatch(config.device):
        raise WrongValue("device", f"device is auto, cpu, cuda or cuda:N, not {config.device!r}")
    for knob, capacity, bound in (
        ("max_num_batched_tokens", "token_capacity", config.token_capacity),
        ("max_num_seqs", "seq_capacity", config.seq_capacity),
    ):
        value = getattr(knobs, knob)
        if bound and value > bound:
            option = capacity.replace("_", "-")
            raise WrongValue(
                "out_of_bounds",
                f"{knob}={value} is above {capacity}={bound}: raise --{option}, or lower the knob",
            )
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


def _check_role(config: EngineConfig) -> None:
    if config.transfer_memory != "auto":
        memory_bytes("transfer_memory", config.transfer_memory)
    if config.role == "prefill" and not config.decode_to:
        raise WrongValue(
            "role", "role=prefill needs the engine that decodes: --decode-to NAME or ADDRESS"
        )
    if config.role != "prefill" and config.decode_to:
        raise WrongValue("role", f"decode_to needs role=prefill, this engine is {config.role}")
