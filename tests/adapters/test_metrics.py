"""An engine known by its `/metrics` only: which figures are read and which stay unknown."""

import json
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socket import create_server
from typing import Any

import pytest

from stepscope.engine.adapters.metrics import local_servers
from stepscope.engine.adapters.metrics.fetch import (
    MAX_BYTES,
    FetchError,
    MetricsAddress,
    in_file,
    reading_of,
)
from stepscope.engine.adapters.metrics.local_servers import (
    LocalServer,
    LocalServers,
    listening_ports,
    without_attached,
)
from stepscope.engine.adapters.metrics.reading import has_restarted, read, totals
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.knobs import WrongValue
from stepscope.engine.protocol.wire import LatencyEstimate
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.fleets.fleet import Fleet
from stepscope.recordings.history.history import History
from stepscope.recordings.history.source import Source
from stepscope.recordings.live import scraper
from stepscope.recordings.live.recorder import Recorder
from stepscope.recordings.live.scraper import Scraper
from stepscope.tui.session.live_source import addresses
from stepscope.tui.views.frame.frame_builder import FrameBuilder
from stepscope.tui.views.pages.page_views import PAGE_VIEWS
from stepscope.tui.views.panels import header
from stepscope.tui.views.view import View
from tests.support.engines.metrics_server import metrics_server
from tests.support.waiting import wait_for

TEXTS = Path(__file__).with_name("metrics_texts")
EVERY_S = 0.02


class Engine:
    """Metrics of a vLLM; the test moves its counters."""

    def __init__(self) -> None:
        self.started_s = 100.0
        self.running, self.prompt, self.output = 3, 1000, 500
        self.gaps = [40, 60, 60]  # up to 25 ms, 50 ms, and all

    def text(self) -> bytes:
        labels = 'model_name="m",engine="0"'
        lines = [
            f"process_start_time_seconds {self.started_s}",
            f"vllm:num_requests_running{{{labels}}} {self.running}.0",
            f"vllm:num_requests_waiting{{{labels}}} 1.0",
            f'vllm:num_requests_waiting_by_reason{{{labels},reason="capacity"}} 1.0',
            f"vllm:kv_cache_usage_perc{{{labels}}} 0.5",
            f"vllm:prompt_tokens_total{{{labels}}} {self.prompt}",
            f"vllm:generation_tokens_total{{{labels}}} {self.output}",
            f"vllm:num_preemptions_total{{{labels}}} 0",
        ]
        for bound, count in zip(("0.025", "0.05", "+Inf"), self.gaps, strict=True):
            name = "vllm:inter_token_latency_seconds_bucket"
            lines.append(f'{name}{{{labels},le="{bound}"}} {count}')
        return "\n".join(lines).encode()

    def reading(self) -> Any:
        return read(self.text().decode())


def text_of(name: str) -> str:
    return (TEXTS / f"{name}.txt").read_text()


@pytest.fixture(autouse=True)
def is_scraped_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scraper, "EVERY_S", EVERY_S)


@contextmanager
def scraped(url: str) -> Iterator[Scraper]:
    source = Scraper(MetricsAddress.parse(url), History())
    source.start()
    try:
        yield source
    finally:
        source.stop()


def until(source: Source, number: int) -> None:
    wait_for(lambda: source.history.num_steps >= number, "what the server did is in the history")


@pytest.mark.parametrize(
    ("name", "load", "counters", "histograms"),
    [
        ("vllm-0.32", ("vllm", 0, 0, 0.0),
         {"prompt_tokens": 7200, "output_tokens": 720, "queried_tokens": 7200,
          "cached_tokens": 5920, "preempted": 0, "finished": 6, "steps": 120},
         {"ttft": 6, "itl": 714, "tpot": 6}),
        ("sglang-0.5.23", ("sglang", 8, 2, 0.4), {"cached_tokens": 3500, "preempted": 4}, {}),
        ("tensorrt-llm-1.3", ("tensorrt-llm", 6, 1, 0.62), {"output_tokens": 800}, {}),
        ("tensorrt-llm-1.0", ("tensorrt-llm", None, None, 0.25), {"finished": 12}, {}),
    ],
)  # fmt: skip
def test_what_engines_export_is_read(
    name: str, load: tuple[object, ...], counters: dict[str, int], histograms: dict[str, int]
) -> None:
    found: Any = read(text_of(name))
    kv_used = found.kv_used and round(found.kv_used, 6)
    assert (found.engine, found.num_running, found.num_waiting, kv_used) == load
    assert found.counters.items() >= counters.items()
    whole = {kind: buckets[math.inf] for kind, buckets in found.histograms.items()}
    assert whole.items() >= histograms.items()
    gained = totals(found, found)
    assert gained.is_load_known is (found.num_running is not None)
    assert (gained.num_steps is None) is ("steps" not in counters)  # vLLM alone counts them


Labels = dict[str, object]
_DP_ATTENTION = [{"tp_rank": i, "moe_ep_rank": i, "dp_rank": i} for i in range(4)]
_ALL_SCHEDULERS = [{"tp_rank": i, "moe_ep_rank": i // 2, "dp_rank": i // 6} for i in range(12)]


def page(series: list[Labels], engine: str) -> str:
    """The page of a server on which each series has 5 running, 2 waiting, and its own KV share."""
    names = {
        "vllm": ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
        "sglang": ("num_running_reqs", "num_queue_reqs", "token_usage"),
    }[engine]
    lines = []
    for number, labels in enumerate(series):
        text = ",".join(f'{name}="{value}"' for name, value in {"pp_rank": 0, **labels}.items())
        for name, value in zip(names, (5, 2, (number + 1) / 20), strict=True):
            lines.append(f"{engine}:{name}{{{text}}} {value}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("series", "engine", "counting"),
    [
        (_DP_ATTENTION, "sglang", [0, 1, 2, 3]),
        (_DP_ATTENTION[1:], "sglang", [0, 1, 2]),  # a node without the first rank
        (_ALL_SCHEDULERS, "sglang", [0, 6]),
        (_ALL_SCHEDULERS[::-1], "sglang", [5, 11]),
        ([{"tp_rank": i, "moe_ep_rank": 0} for i in range(4)], "sglang", [0]),
        ([{"tp_rank": i, "dp_rank": 0} for i in (10, 9)], "sglang", [1]),
        ([{"tp_rank": 0, "pp_rank": i % 2, "dp_rank": i // 2} for i in range(4)], "sglang", [0, 2]),
        ([{"tp_rank": 0, "priority": each} for each in ("", 1, 7)], "sglang", [0]),
        ([{"tp_rank": 0, "engine_type": each} for each in ("prefill", "decode")], "sglang", [0, 1]),
        ([{"engine": i, "model_name": "m"} for i in range(3)], "vllm", [0, 1, 2]),
        ([{"engine": 0, "model_name": each} for each in ("m", "n")], "vllm", [0, 1]),
    ],
)
def test_ranks_of_one_replica_are_copies_and_everything_else_is_a_part(
    series: list[Labels], engine: str, counting: list[int]
) -> None:
    found: Any = read(page(series, engine))
    assert (found.num_running, found.num_waiting) == (5 * len(counting), 2 * len(counting))
    shares = [(number + 1) / 20 for number in counting]
    assert found.kv_used == pytest.approx(sum(shares) / len(shares))
    models = dict.fromkeys(str(each["model_name"]) for each in series if "model_name" in each)
    assert found.model == ", ".join(models)


def test_a_new_tensorrt_llm_is_scraped_at_its_own_path() -> None:
    with metrics_server(text_of("tensorrt-llm-1.3").encode, "/prometheus/metrics") as url:
        assert reading_of(MetricsAddress.parse(url)).num_running == 6


def test_older_names_are_read_and_malformed_lines_left_out() -> None:
    found: Any = read(
        'vllm:num_requests_running{model_name="m"} NaN\n'
        'vllm:num_requests_waiting{model_name="m" 3\n'
        "vllm:kv_cache_usage_perc much\n"
        'vllm:gpu_cache_usage_perc{model_name="m"} 0.25\n'
        'vllm:gpu_prefix_cache_hits_total{model_name="m"} 7\n'
        'vllm:time_per_output_token_seconds_bucket{le="0.1",model_name="m"} 3\n'
        'vllm:prompt_tokens_total{model_name="m"} 5\n'
    )
    assert (found.num_running, found.num_waiting, found.kv_used) == (None, None, 0.25)
    assert found.counters == {"prompt_tokens": 5, "cached_tokens": 7}
    assert found.histograms == {"itl": {0.1: 3}}
    assert read("node_cpu_seconds_total 5\n") is None


def test_latencies_are_estimated_from_the_growth_of_histogram_buckets() -> None:
    engine = Engine()
    before = engine.reading()
    engine.gaps = [44, 66, 67]  # 4 up to 25 ms, 2 up to 50 ms, 1 above
    gained = totals(before, engine.reading())
    assert gained.itl == [
        *(LatencyEstimate(ms, 1) for ms in (3.125, 9.375, 15.625, 21.875)),
        *(LatencyEstimate(ms, 1) for ms in (31.25, 43.75)),
        LatencyEstimate(50.0, 1),  # how far above the highest bound is unknown
    ]
    assert gained.ttft == []


@pytest.mark.parametrize("change", [{"output": 20}, {"gaps": [0, 0, 0]}, {"started_s": 200.0}])
def test_a_counter_that_falls_means_that_the_server_restarted(change: dict[str, object]) -> None:
    engine = Engine()
    before = engine.reading()
    assert not has_restarted(before, engine.reading())
    vars(engine).update(change)
    assert has_restarted(before, engine.reading())


def test_counter_increases_are_shown_and_figures_without_a_counter_are_unknown() -> None:
    engine = Engine()
    with metrics_server(engine.text) as url, scraped(url) as source:
        until(source, 1)
        engine.prompt, engine.output, engine.gaps = 1800, 900, [240, 460, 460]
        wait_for(lambda: source.history.windows.latency(None, 60, 1).itl.num_samples > 0)
        state = source.history.state
        assert (state.num_running, state.num_waiting, state.kv_share) == (3, 1, 0.5)
        assert state.waiting_reasons == {"capacity": 1}
        columns: list[Any] = [*map(source.history.summary, range(source.history.num_steps))]
        assert sum(each.num_output_tokens or 0 for each in columns) == 400
        assert sum(each.num_prefill_tokens for each in columns) == 800
        assert source.history.windows.latency(None, 60, 1).itl.num_samples == 400
        assert source.history.windows.sums(None, 10.0).steps_per_s is None
        frame = FrameBuilder(source.history).build(View(), 80, 10, 8)
        assert frame.lanes == []
        figures = _drawn(header.key_figures(frame, 200, 1, 0))
        assert "RUN 3  WAIT 1" in figures
        assert "KV 50%" in figures
        assert "ITL p99 ≈" in figures
        for page in PAGE_VIEWS.keys() & {"live", "step", "kv", "latency", "knobs", "request"}:
            assert _drawn(PAGE_VIEWS[page].draw(frame, 120, 35))
        live = _drawn(PAGE_VIEWS["step"].draw(frame, 120, 35))
        assert "metrics are totals" in live
        assert "STEPSCOPE_ENDPOINT=vllm-0 vllm serve" in live


def test_a_restarted_server_begins_a_new_session() -> None:
    engine = Engine()
    with metrics_server(engine.text) as url, scraped(url) as source:
        until(source, 2)
        first = source.history.info
        engine.started_s, engine.prompt, engine.output, engine.gaps = 200.0, 0, 0, [0, 0, 0]
        wait_for(lambda: source.history.info != first, "a new session")
        until(source, 2)
        outputs: list[Any] = [*map(source.history.summary, range(source.history.num_steps))]
        assert {each.num_output_tokens for each in outputs} == {0}


def test_a_scraped_server_that_dies_is_down_until_it_returns() -> None:
    engine = Engine()
    with ExitStack() as stack:
        with metrics_server(engine.text) as url:
            source = stack.enter_context(scraped(url))
            until(source, 2)
        wait_for(lambda: source.status == "down", "it is down")
        assert "/metrics" in (source.error or "")
        with metrics_server(engine.text, port=int(url.rpartition(":")[2])):
            wait_for(lambda: source.status == "live", "it is back")


def test_a_scrape_of_a_hung_server_times_out() -> None:
    with create_server(("127.0.0.1", 0)) as server:
        address = MetricsAddress.parse(f"http://127.0.0.1:{server.getsockname()[1]}/metrics")
        with pytest.raises(FetchError, match=r"took longer than 0\.2 s"):
            reading_of(address, timeout_s=0.2)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"\xff\xfe\x00garbage" * 100, "exports no metric of vLLM"),
        (b"", "exports no metric of vLLM"),
        (b"x" * (MAX_BYTES + 1), "more than 8 MiB"),
    ],
)
def test_garbage_and_oversized_responses_give_a_one_line_error(body: bytes, expected: str) -> None:
    with metrics_server(lambda: body) as url, pytest.raises(FetchError, match=expected):
        reading_of(MetricsAddress.parse(f"{url}/metrics"))


def test_scraped_metrics_are_recorded_without_single_tokens(stepscope: Any, tmp_path: Path) -> None:
    engine, path = Engine(), tmp_path / "m.mcap"
    with metrics_server(engine.text) as url, scraped(url) as source:
        until(source, 1)
        recorder = Recorder(source, path)
        engine.output += 40
        until(source, source.history.num_steps + 4)
        recorder.stop()
    with Recording(path) as recording:
        messages = [wire.decode(frame.payload) for frame, _ in recording.frames()]
    told = [totals for each in messages if (totals := getattr(each, "totals", None))]
    assert 40 in [each.num_output_tokens for each in told]
    done = stepscope("explain", str(path))
    assert done.exit_code != 0
    assert "why a token was late is unknown" in done.stderr


def test_several_metrics_servers_are_shown_as_a_fleet() -> None:
    engines = [Engine(), Engine()]
    engines[1].running = 30
    with metrics_server(engines[0].text) as one, metrics_server(engines[1].text) as two:
        found = [MetricsAddress.parse(url) for url in (one, two)]
        fleet = Fleet([Scraper(each, History()) for each in found])
        with ExitStack() as stack:
            stack.callback(fleet.stop)
            fleet.start()
            for each in fleet.sources:
                until(each, 2)
            lines = fleet.look().lines
    assert [line.figures.num_running for line in lines] == [3, 30]
    assert [line.figures.kv_used for line in lines] == [0.5, 0.5]


def test_metrics_addresses_are_urls_or_a_target_list_in_a_file(tmp_path: Path) -> None:
    listed = tmp_path / "targets.json"
    targets = {"targets": ["a:8000", "b:1"], "labels": {"__metrics_path__": "/m", "job": "x"}}
    listed.write_text(json.dumps([targets, {"targets": ["c:2"]}]))
    names = [each.control for each in in_file(listed)]
    assert names == ["http://a:8000/m", "http://b:1/m", "http://c:2"]
    assert addresses(str(listed)) == in_file(listed)
    assert addresses("http://h:8000/")[0] == MetricsAddress("http://h:8000")
    for bad in ("http://", "http://h:x", "http://u:p@h:1", "ftp://h"):
        with pytest.raises(WrongValue):
            MetricsAddress.parse(bad)
    listed.write_text('{"targets": 5}')
    with pytest.raises(WrongValue, match="no list of targets"):
        in_file(listed)


def _drawn(lines: Any) -> str:
    return "\n".join("".join(text for text, *_ in line) for line in lines)


def test_stats_and_snapshot_read_a_server(stepscope: Any) -> None:
    engine = Engine()

    def text() -> bytes:
        engine.output += 10
        return engine.text()

    with metrics_server(text) as url:
        found = json.loads(stepscope("stats", url, "--seconds", "0.2", "--json").stdout)["figures"]
        told = json.loads(stepscope("snapshot", url, "--json").stdout)
        said = stepscope("snapshot", url).stdout
    assert (found["waiting"], found["kv_used"]) == (1, 0.5)
    assert found["out_tokens_per_s"] > 0
    assert found["step_p50"] is found["finished"] is found["busy"] is None
    assert (told["num_running"], told["num_waiting"], told["totals"]["kv_used"]) == (3, 1, 0.5)
    assert "3 running, 1 waiting" in said
    assert "50% used" in said
    done = stepscope("stats", url)  # it is gone
    assert (done.exit_code != 0, done.stderr.count("\n")) == (True, 1)


def test_inference_servers_on_this_machine_are_found_and_other_servers_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        metrics_server(text_of("vllm-0.32").encode) as vllm,
        metrics_server(lambda: b"stepscope_steps_total 5\n") as ours,
        metrics_server(lambda: b"node_load1 5\n") as other,
        create_server(("127.0.0.1", 0)) as silent,
    ):
        ports = [int(url.rpartition(":")[2]) for url in (vllm, ours, other)]
        ports.append(silent.getsockname()[1])
        monkeypatch.setattr(
            local_servers, "listening_ports", lambda: [(port, None) for port in ports]
        )
        servers = LocalServers()
        try:
            assert servers.wait(30) == (LocalServer(MetricsAddress(vllm), "vllm", None),)
        finally:
            servers.stop()


def test_usual_ports_are_probed_and_ports_of_other_processes_are_not() -> None:
    with create_server(("127.0.0.1", 0)) as mine:
        ports = dict(listening_ports())
        assert {8000, 30000} <= set(ports)
        assert mine.getsockname()[1] not in ports


def test_the_server_of_an_attached_engine_is_not_listed_twice() -> None:
    address = MetricsAddress("http://127.0.0.1:1")
    servers = [LocalServer(address, "vllm", os.getppid()), LocalServer(address, "vllm", None)]
    assert without_attached(servers, [os.getpid()]) == servers[1:]
    assert without_attached(servers, []) == servers
