"""Formats numbers, durations and times for people, in few cells where a column needs it."""

import time
from collections.abc import Sequence


def count(value: float | None) -> str:
    """Return 184223 as 184,223, and None (unknown) as a dash."""
    return "—" if value is None else f"{value:,.0f}"


def short(value: float | None) -> str:
    """Return a number in at most four cells: 812, 4.1k, 12k, 1.2M."""
    if value is None:
        return "—"
    for unit in ("", "k", "M", "G"):
        if abs(value) < 999.5:
            if unit and abs(value) < 9.95:
                return f"{value:.1f}{unit}"
            return f"{value:.0f}{unit}"
        value /= 1000
    return f"{value:.0f}T"


def milliseconds(value: float | None) -> str:
    """Return milliseconds in at most five cells: 0.42, 18.2, 412, 12.3s."""
    if value is None:
        return "—"
    if value < 9.995:
        return f"{value:.2f}" if value < 0.995 else f"{value:.1f}"
    if value < 99.95:
        return f"{value:.1f}"
    if value < 9999.5:
        return f"{value:.0f}"
    return f"{value / 1000:.1f}s" if value < 99_950 else f"{value / 1000:.0f}s"


def either_unit(value: float | None) -> str:
    """Return milliseconds with their unit, from one second on in seconds: 19.5ms, 3.2s."""
    if value is None:
        return "—"
    if value < 999.5:
        return f"{milliseconds(value)}ms"
    return f"{value / 1000:.1f}s" if value < 99_950 else f"{value / 1000:.0f}s"


def with_ms(value: float | None) -> str:
    """Return `milliseconds` with its unit: 18.2 ms, 12.3s."""
    shown = milliseconds(value)
    return shown + ms_unit(shown)


def ms_unit(shown: str) -> str:
    """Return the unit to put after a text from `milliseconds`; empty for seconds or a dash."""
    return "" if shown.endswith(("s", "—")) else " ms"


def percent(share: float | None) -> str:
    return "—" if share is None else f"{share * 100:.0f}%"


def exact_percent(share: float) -> str:
    """Return a share in percent. One that only rounds to 100 % or 0 % is not shown as such."""
    if share >= 1 or share <= 0:
        return f"{share:.0%}"
    return f"{min(0.999, max(0.001, share)):.1%}"


def first_fitting(forms: Sequence[str], room: int) -> str:
    """Return the first of these texts that fits into `room` cells; the last if none fits."""
    return next((form for form in forms if len(form) <= room), forms[-1])


def whole_words(text: str, room: int) -> str:
    """Return as many words as fit, with "…" if there were more."""
    if len(text) <= room:
        return text
    words = text[:room].rpartition(" ")[0].rstrip(" ,;:(")
    return f"{words}…" if words else ""


def three_digits(value: float) -> str:
    """Return a number with three significant digits, or more if its integer part has more."""
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{decimals}f}"


def size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.0f}{unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f}GB"


def clock(wall_ns: int | None) -> str:
    """Return a time of day in the local time zone; dashes if the time is unknown."""
    if wall_ns is None:
        return "--:--:--"
    return time.strftime("%H:%M:%S", time.localtime(wall_ns / 1e9))


def moment(wall_ns: int | None, with_tenths: bool = False) -> str:
    """Return a time of day in the local time zone; if not today, with the date: Nov 15 12:41:58."""
    if wall_ns is None:
        return clock(None)
    when, today = time.localtime(wall_ns // 10**9), time.localtime()
    shown = time.strftime("%H:%M:%S", when)
    if with_tenths:
        shown += f".{wall_ns // 10**8 % 10}"
    if when[:3] == today[:3]:
        return shown
    year = "" if when.tm_year == today.tm_year else f" {when.tm_year}"
    return f"{time.strftime('%b', when)} {when.tm_mday}{year} {shown}"


def span(seconds: float) -> str:
    """Return a duration with units: 15 ms, 2.1 s, 12 s, 4 min 2 s, 1 h 12 min."""
    if seconds < 0.95:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def short_span(seconds: float) -> str:
    """Return a duration in at most six cells: 3.2s, 42s, 12m41s, 3h05m."""
    if seconds < 99.5:
        return f"{seconds:.1f}s" if seconds < 9.95 else f"{seconds:.0f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def file_size(num_bytes: int) -> str:
    if num_bytes < 1_000_000:
        return f"{num_bytes / 1000:.1f} kB"
    if num_bytes >= 1_000_000_000:
        return f"{num_bytes / 1_000_000_000:.2f} GB"
    return f"{num_bytes / 1_000_000:.1f} MB"
