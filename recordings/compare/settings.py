"""Finds the settings in which two runs differ."""

from typing import NamedTuple

from stepscope.engine.protocol.wire import EngineInfo, KnobValue
from stepscope.recordings.compare.side.side import Side

# Fields of `EngineInfo` that may change performance, unlike names and addresses.
_FIELDS = (
    "model",
    "num_parameters",
    "dtype",
    "device",
    "implementation",
    "attention_backend",
    "block_size",
    "num_blocks",
    "max_model_len",
    "overlap",
    "software_version",
)
_CAPACITIES = {"max_num_batched_tokens": "token budget at most", "max_num_seqs": "seats at most"}


class SettingDifference(NamedTuple):
    """A knob or an engine property in which two runs differ.

    Attributes:
        a, b: all values it had in that run, in order; empty if unknown.
    """

    name: str
    a: tuple[KnobValue, ...]
    b: tuple[KnobValue, ...]
    is_knob: bool


def differing_settings(a: Side, b: Side) -> list[SettingDifference]:
    """Differing knobs, then engine properties. A setting unknown on one side is left out."""
    names = [name for name in a.knob_values if name in b.knob_values]
    found = [
        SettingDifference(name, tuple(a.knob_values[name]), tuple(b.knob_values[name]), True)
        for name in names
    ]
    if a.info is not None and b.info is not None:
        for field, label in {**{name: name for name in _FIELDS}, **_CAPACITIES}.items():
            found.append(
                SettingDifference(label, _values(a.info, field), _values(b.info, field), False)
            )
    if a.workload is not None and b.workload is not None:
        found.append(SettingDifference("workload", (a.workload,), (b.workload,), False))
    return [each for each in found if each.a and each.b and each.a != each.b]


def _values(info: EngineInfo, field: str) -> tuple[KnobValue, ...]:
    value: KnobValue | None = getattr(info, field)
    return () if value is None else (value,)
