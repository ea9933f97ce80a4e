"""The figures of the KV page: how blocks are shared and filled, and what the cache was worth."""

from array import array
from collections import Counter

from stepscope.recordings.session.sums import Sums, per, plus
from stepscope.tui.views import format as fmt
from stepscope.tui.views.charts import kv_map
from stepscope.tui.views.frame.frame import Frame
from stepscope.tui.views.lines import Line, Run, clean

WIDTH = 46  # of the panel
MAX_COUNTED = 65_536  # most blocks to look at; of more, evenly spaced ones


def draw(frame: Frame) -> list[Line]:
    """Return the lines: the pool, its groups, hits, what waits, and why prompts missed."""
    kv, owner, refs = frame.state.kv, frame.state.block_owner, frame.state.block_refs
    lines: list[Line] = []
    if kv is None:
        lines.append(((" the engine does not report its blocks", "muted"),))
    else:
        total = max(1, kv.used + kv.cached + kv.empty)
        lines += [
            _part("used", kv.used, total, "kv_used"),
            _part("cached, free", kv.cached, total, "kv_cached"),
            _part("empty", kv.empty, total, "kv_empty"),
        ]
    lines += _group_lines(frame)
    if owner is not None and refs is not None and len(refs):
        lines += _references(refs)
    rates = frame.rates
    evictions = rates.evictions_per_s
    lines += [
        _figure("prefix hit rate", fmt.percent(rates.prefix_hit_rate), "of tokens, 10 s"),
        _figure(
            "evictions", "—" if evictions is None else f"{evictions:.1f}/s", "of cached blocks"
        ),
        _figure("fragmentation", fmt.percent(kv_map.unfilled_share(frame)), "of held slots"),
    ]
    lines += _transfer_lines(frame)
    info, prompts = frame.state.info, frame.prompts
    if prompts is not None and prompts.num_evicted_tokens is not None:
        return lines + _prompts(prompts)
    if owner is not None and info is not None and info.engine == "vllm" and info.kv_groups is None:
        lines.append(((" why prompts miss: STEPSCOPE_PREFIX_HASHES=1", "muted"),))
    return lines


def _prompts(sums: Sums) -> list[Line]:
    """Return lines on all prompts in memory: how much was hit, and why the rest was not."""
    queried, hit = sums.num_queried_tokens, sums.num_hit_tokens
    if not queried:
        return []
    lines: list[Line] = [
        _figure("prompt tokens", fmt.short(queried), "all in memory"),
        _part("  hit", hit, queried, "cached"),
        _part("  new", sums.num_new_tokens, queried, "muted"),
        _part("  diverged", sums.num_diverged_tokens, queried, "prefill"),
        _part("  evicted", sums.num_evicted_tokens, queried, "caution"),
    ]
    half, twice = (
        fmt.percent(per(plus(hit, more), queried))
        for more in (sums.num_more_hits_1_5x, sums.num_more_hits_2x)
    )
    lines.append(_figure("hits, 1.5x pool", half, f"2x pool {twice}"))
    return lines


def _part(name: str, count: int | None, total: int, style: str) -> Line:
    share = per(count, total) or 0.0
    number = fmt.count(count) if total < 10_000_000 else fmt.short(count)
    return (
        (f" {name:<13}", "muted"),
        (f"{number:>8} {share:>4.0%}  ", "text"),
        ("█" * round(share * 14), style),
    )


def _group_lines(frame: Frame) -> list[Line]:
    lines: list[Line] = []
    # Else the letters are those of the holders.
    has_letters = frame.view.kv_map == "group"
    for number, (group, each, share) in enumerate(kv_map.groups_of(frame)):
        letter = kv_map.group_letter(number) if has_letters else " "
        window = "" if group.window is None else f", window {group.window:,}"
        tables = "" if group.num_tables == 1 else f", {group.num_tables} tables"
        about = f"   {group.num_layers} layers{tables}{window}; {group.block_size:,} tok"
        lines += [
            (
                (f" {letter} ", kv_map.group_style(number)),
                (f"{clean(group.kind, 17):<17}", "text"),
                (f"{each.used:>7,} {share:>4.0%}", "strong"),
                (f" +{each.cached:,} cached", "kv_cached"),
            ),
            ((about[: WIDTH - 2], "muted"),),
        ]
    info = frame.state.info
    if info is not None and info.kv_tokens is not None and info.max_model_len:
        whole = f"tokens, {info.kv_tokens / info.max_model_len:,.1f} × {info.max_model_len:,}"
        lines.append(_figure("room", f"{info.kv_tokens:,}", whole))
    return lines


def _transfer_lines(frame: Frame) -> list[Line]:
    transfers = frame.state.kv_transfers
    if transfers is None:
        return []
    lines = []
    for name, count, since_ns in (
        ("being loaded", transfers.num_loading, transfers.loading_since_ns),
        ("to be sent", transfers.num_sending, transfers.sending_since_ns),
    ):
        if count and since_ns is not None:
            seconds = max(0, frame.state.time_ns - since_ns) / 1e9
            lines.append(_figure(name, f"{count:,}", f"used blocks, {seconds:,.1f} s"))
    return lines


def _figure(name: str, value: str, about: str) -> Line:
    return ((f" {name:<16}", "muted"), (f"{value:>7}  ", "text"), (about, "muted"))


def _references(refs: "array[int]") -> list[Line]:
    """Return lines on how many requests refer to a block, and how many blocks sharing saves."""
    stride = -(-len(refs) // MAX_COUNTED)
    about = "≈" if stride > 1 else ""
    counts = Counter(refs[::stride] if stride > 1 else refs)
    shared = sum(number for count, number in counts.items() if count > 1) * stride
    saved = sum((count - 1) * number for count, number in counts.items() if count > 1) * stride
    groups = [
        ("1", counts.get(1, 0)),
        ("2", counts.get(2, 0)),
        ("3-4", counts.get(3, 0) + counts.get(4, 0)),
        ("5+", sum(number for count, number in counts.items() if count >= 5)),
    ]
    line: list[Run] = [(" references ", "muted")]
    for name, number in groups:
        line += [(f" {name}: ", "muted"), (f"{about}{number * stride:,}", "text")]
    return [
        tuple(line),
        (
            (" shared       ", "muted"),
            (f"{about}{shared:>7,}", "kv_shared"),
            ("  blocks, saves ", "muted"),
            (f"{about}{saved:,}", "text"),
        ),
    ]
