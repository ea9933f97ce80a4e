"""Finds which engine of several stands out, in which figure, and by how much.

An engine stands out if its value exceeds the median of the *other* engines by both a factor and a
minimum difference. The engine itself is not part of that median: with few engines, a bad one would
raise an average of all and hide behind it. The bounds are so wide that equal engines under random
arrivals stay within them.

A finding is shown once it has lasted some seconds. An unknown value is neither high nor low.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Literal, NamedTuple, TypeAlias, get_args

from stepscope.recordings.fleets.figures import EngineFigures
from stepscope.recordings.state.audit_text import value_text

HOLD_S = 3.0  # a finding is shown after so long

# In the order of display: first what a router can change, then what follows from that.
FleetFigure: TypeAlias = Literal["waiting", "kv", "preemptions", "ttft", "itl", "hits", "room"]


class OutlierFigure(NamedTuple):
    engine: int  # index of the engine
    figure: FleetFigure
    weight: float  # how far beyond the others, relative to the bound
    text: str


class Imbalance(NamedTuple):
    """One engine that stands out, with all figures in which it does."""

    engine: int
    name: str
    figures: tuple[FleetFigure, ...]
    texts: tuple[str, ...]
    since_s: float  # by the clock of `ImbalanceKeeper.update`
    weight: float

    @property
    def has_room(self) -> bool:
        """Whether the engine stands out because it has too little to do, rather than too much."""
        return "room" in self.figures


class _Rule(NamedTuple):
    """A figure, and how far an engine's value must exceed the median of the other engines."""

    figure: FleetFigure
    value: Callable[[EngineFigures], float | None]
    factor: float
    distance: float
    least: float  # a smaller value never stands out
    text: Callable[["_Seen"], str]


class _Seen(NamedTuple):
    value: float
    median: float
    total: float
    lowest: str  # name of the engine with the lowest value
    least: float


def _times(ms: float, others: float) -> str:
    said = f"{ms / 1000:.1f} s" if ms >= 999.5 else f"{ms:.0f} ms"
    return f"{said}, {ms / others:.1f}x the median of the others" if others else said


_RULES = (
    _Rule("kv", lambda e: e.kv_used, 1.3, 0.25, 0.6,
          lambda s: f"KV {s.value:.0%}, {s.lowest} {s.least:.0%}"),
    _Rule("ttft", lambda e: e.ttft_p95_ms, 2.0, 100.0, 0.0,
          lambda s: f"TTFT p95 {_times(s.value, s.median)}"),
    _Rule("itl", lambda e: e.itl_p95_ms, 1.5, 10.0, 0.0,
          lambda s: f"ITL p95 {_times(s.value, s.median)}"),
    _Rule("preemptions", lambda e: e.num_preempted, 3.0, 3.0, 0.0,
          lambda s: f"{s.value:.0f} preemptions a minute, the others {s.median:.0f}"),
    _Rule("waiting", lambda e: e.num_waiting, 2.0, 4.0, 0.0,
          lambda s: f"{s.value / s.total:.0%} of all waiting requests ({s.value:.0f} of "
                    f"{s.total:.0f}), {s.lowest} has {s.least:.0f}"),
    # Prompt tokens that were not in the cache: they may be cached on another engine.
    _Rule("hits", lambda e: None if e.prefix_hit_rate is None else 1 - e.prefix_hit_rate,
          1.0, 0.3, 0.0,
          lambda s: f"prefix hits {1 - s.value:.0%}, the others {1 - s.median:.0%}"),
)  # fmt: skip
_ROOM_WAITING = 4  # least number of requests that wait in other engines
_ROOM_SHARE = 0.5  # most seats, and KV blocks, in use


def findings(engines: Sequence[EngineFigures]) -> list[OutlierFigure]:
    """Return the engines and figures that stand out now, the worst first.

    Engines that only prefill, or only decode, are compared among themselves.
    """
    roles = [None if engine.info is None else engine.info.role for engine in engines]
    found: list[OutlierFigure] = []
    for role in dict.fromkeys(roles):
        places = [place for place, each in enumerate(roles) if each == role]
        mine = [engines[place] for place in places]
        high = [each for rule in _RULES for each in _high(mine, rule)]
        for each in (*high, *_room(mine)):
            found.append(each._replace(engine=places[each.engine]))
    return sorted(found, key=lambda each: -each.weight)


def _known(
    engines: Sequence[EngineFigures], value: Callable[[EngineFigures], float | None]
) -> dict[int, float]:
    return {
        place: known
        for place, engine in enumerate(engines)
        if engine.is_up and (known := value(engine)) is not None
    }


def _high(engines: Sequence[EngineFigures], rule: _Rule) -> list[OutlierFigure]:
    values = _known(engines, rule.value)
    found = []
    for place, value in values.items():
        others = {other: values[other] for other in values if other != place}
        if not others or value < rule.least:
            continue
        middle = median(others.values())
        bound = max(middle * rule.factor, middle + rule.distance)
        if value >= bound:
            lowest = min(others, key=lambda other: others[other])
            total, name = sum(values.values()), engines[lowest].name
            text = rule.text(_Seen(value, middle, total, name, others[lowest]))
            found.append(OutlierFigure(place, rule.figure, value / bound, text))
    return found


def _room(engines: Sequence[EngineFigures]) -> list[OutlierFigure]:
    """Find engines with free seats and KV blocks, while requests wait in other engines."""
    waiting = _known(engines, lambda e: e.num_waiting)
    found = []
    for place, number in waiting.items():
        engine = engines[place]
        elsewhere = sum(waiting.values()) - number
        running, seats = engine.num_running, engine.num_seats
        if number or elsewhere < _ROOM_WAITING or running is None or not seats:
            continue
        kv = engine.kv_used
        is_open = engine.state in ("running", "idle")
        if is_open and running <= seats * _ROOM_SHARE and (kv is None or kv <= _ROOM_SHARE):
            cache = "" if kv is None else f", KV {kv:.0%}"
            text = f"has room: {running} of {seats} seats{cache}, {elsewhere:.0f} wait elsewhere"
            found.append(OutlierFigure(place, "room", 1 - running / seats, text))
    return found


class ImbalanceKeeper:
    """Remembers since when each finding holds, to show only those that last."""

    def __init__(self) -> None:
        self._since_s: dict[tuple[int, FleetFigure], float] = {}

    def update(self, engines: Sequence[EngineFigures], now_s: float) -> list[Imbalance]:
        """Return the engines that have stood out for `HOLD_S`: overloaded ones first, by weight."""
        found = {(each.engine, each.figure): each for each in findings(engines)}
        self._since_s = {key: self._since_s.get(key, now_s) for key in found}
        held: dict[int, list[OutlierFigure]] = {}
        for key in sorted(found, key=lambda key: get_args(FleetFigure).index(key[1])):
            if now_s - self._since_s[key] >= HOLD_S:
                held.setdefault(key[0], []).append(found[key])
        imbalances = [
            Imbalance(
                engine=place,
                name=engines[place].name,
                figures=tuple(each.figure for each in mine),
                texts=tuple(each.text for each in mine),
                since_s=min(self._since_s[place, each.figure] for each in mine),
                weight=max(each.weight for each in mine),
            )
            for place, mine in held.items()
        ]
        return sorted(imbalances, key=lambda each: (each.has_room, -each.weight))


def differences(engines: Sequence[EngineFigures]) -> list[str]:
    """Return a text for each setting that differs between engines that are up."""
    up = [engine for engine in engines if engine.is_up and engine.info is not None]
    ids = _by_value(up, [getattr(each.info, "engine_id", None) for each in up])
    same = [" and ".join(names) for names in ids.values() if len(names) > 1]
    found = [f"{names} are one and the same engine" for names in same]
    compared: dict[str, list[object]] = {
        label: [getattr(engine.info, name, None) for engine in up] for label, name in _SETTINGS
    }
    for knob in sorted({knob for engine in up for knob in engine.knobs}):
        compared[knob] = [
            value_text(engine.knobs[knob]) if knob in engine.knobs else None for engine in up
        ]
    texts = (_difference(label, _by_value(up, values)) for label, values in compared.items())
    return found + [text for text in texts if text]


_SETTINGS = (
    ("model", "model"),
    ("dtype", "dtype"),
    ("device", "device"),
    ("version", "software_version"),
    ("KV blocks", "num_blocks"),
    ("block size", "block_size"),
    ("longest request", "max_model_len"),
)


def _by_value(
    engines: Sequence[EngineFigures], values: Sequence[object]
) -> dict[object, list[str]]:
    """Return value -> names of the engines with it. Engines with an unknown value are left out."""
    names: dict[object, list[str]] = {}
    for engine, value in zip(engines, values, strict=True):
        if value is not None:
            names.setdefault(value, []).append(engine.name)
    return names


def _difference(label: str, names: Mapping[object, list[str]]) -> str | None:
    """Return a text that names the engines whose value differs from that of the majority.

    Without a majority, it names all engines. Returns None if all values are equal.
    """
    if len(names) < 2:
        return None
    common = max(names, key=lambda value: len(names[value]))
    is_majority = len(names[common]) * 2 > sum(map(len, names.values()))
    others = {value: those for value, those in names.items() if not is_majority or value != common}
    parts = [f"{', '.join(those)} {value}" for value, those in others.items()]
    parts += [f"the others {common}"] if is_majority else []
    return f"{label}: {'; '.join(parts)}"
