"""`/metrics` agrees with the step records and has the names that vLLM's dashboards use."""

import json
import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from stepscope.engine.http.exposition import Exposition, TelemetryFollower
from stepscope.engine.http.metrics_reducer import EngineMetrics
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.knobs import Knobs
from stepscope.recordings.state.session import SessionState
from tests.support.engines.live_engine import LiveEngine
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.sessions.received import busy_messages
from tests.support.waiting import wait_for

Messages = list[tuple[int, wire.Telemetry]]
# Names of vLLM 0.32, as its server exposes them.
VLLM_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
VLLM_COUNTERS = (
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"),
    *("prompt_tokens_total", "prompt_tokens_cached_total", "generation_tokens_total"),
)
VLLM_HISTOGRAMS = {
    "iteration_tokens_total": "16384.0",
    "time_to_first_token_seconds": "0.001",
    "inter_token_latency_seconds": "0.025",
    "request_time_per_output_token_seconds": "0.025",
    "e2e_request_latency_seconds": "0.3",
    "request_queue_time_seconds": "7680.0",
    "request_inference_time_seconds": "1920.0",
    "request_prefill_time_seconds": "0.8",
    "request_decode_time_seconds": "40.0",
    "request_prompt_tokens": "500.0",
    "request_generation_tokens": "500.0",
    "request_params_max_tokens": "500.0",
    "request_prefill_kv_computed_tokens": "500.0",
    "request_num_preemptions": "4.0",
}


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def session() -> Messages:
    """A simulated session with preemptions and prefix hits."""
    return busy_messages(400, seed=5)


def reduced(session: Messages) -> EngineMetrics:
    metrics = EngineMetrics()
    for _, message in session:
        if isinstance(message, wire.Snapshot):
            metrics.join(message)
        else:
            metrics.apply(message)
    return metrics


def total(metrics: EngineMetrics, name: str, **labels: str) -> float:
    """The value of a counter, or what another sample of a name with a suffix says."""
    value = metrics.meters.registry.get_sample_value(name, labels)
    assert value is not None, name
    return value


def test_metrics_counts_and_latencies_equal_those_of_the_step_records(session: Messages) -> None:
    metrics = reduced(session)
    steps = [message for _, message in session if isinstance(message, wire.StepRecord)]
    events = [event for _, message in session for event in getattr(message, "events", [])]
    kv = [counts for _, m in session if isinstance(counts := getattr(m, "kv", None), wire.KVCounts)]
    arrivals = {event.request_id: event for event in events if isinstance(event, wire.Arrived)}
    assert total(metrics, "stepscope_steps_total") == len(steps) == 400
    for name, count in (
        ("num_preemptions", sum(isinstance(event, wire.Preempted) for event in events)),
        ("prefix_cache_queries", sum(each.queried_tokens for each in kv)),
        ("prefix_cache_hits", sum(each.hit_tokens for each in kv)),
    ):
        assert total(metrics, f"vllm:{name}_total") == count > 0
    reasons = Counter(event.reason for event in events if isinstance(event, wire.Finished))
    success = "vllm:request_success_total"
    for reason in ("stop", "length", "abort"):
        assert total(metrics, success, finished_reason=reason) == reasons[reason]

    tokens: dict[int, list[int]] = {}
    for step in steps:
        for row in step.batch or ():
            if row.flags & wire.RowFlag.LAST_CHUNK:
                tokens.setdefault(row.request_id, []).append(step.tokens_ns)
    assert total(metrics, "vllm:generation_tokens_total") == sum(map(len, tokens.values()))
    kept = [
        times[0] - arrivals[key].time_ns <= 500e6
        and max((after - before for before, after in pairwise(times)), default=0) <= 50e6
        for key, times in tokens.items()
        if key in arrivals
        and any(isinstance(e, wire.Finished) and e.request_id == key for e in events)
    ]
    assert total(metrics, "stepscope_requests_within_levels_total") == sum(kept) < len(kept)
    known = {key: times for key, times in tokens.items() if key in arrivals}
    assert len(known) > 20
    first = "vllm:time_to_first_token_seconds"
    expected = sum(times[0] - arrivals[key].time_ns for key, times in known.items()) / 1e9
    assert total(metrics, f"{first}_sum") == pytest.approx(expected)
    assert total(metrics, f"{first}_bucket", le="+Inf") == len(known)
    gaps = sum(times[-1] - times[0] for times in known.values()) / 1e9
    assert total(metrics, "vllm:inter_token_latency_seconds_sum") == pytest.approx(gaps)
    done = {e.request_id: e for e in events if isinstance(e, wire.Finished)}
    whole = sum(tokens[key][-1] - arrivals[key].time_ns for key in done if key in arrivals) / 1e9
    assert total(metrics, "vllm:e2e_request_latency_seconds_sum") == pytest.approx(whole)
    parts = [f"vllm:request_{part}_time_seconds_sum" for part in ("queue", "prefill", "decode")]
    assert sum(total(metrics, part) for part in parts) == pytest.approx(whole)
    num_output = total(metrics, "vllm:request_generation_tokens_sum")
    assert num_output == sum(e.num_output_tokens for e in done.values())


def test_metric_names_labels_and_buckets_equal_those_of_vllm(session: Messages) -> None:
    found = samples(Exposition(reduced(session), "tiny").write(0).decode())
    labels = frozenset({("model_name", "tiny"), ("engine", "0")})
    for name in (*VLLM_GAUGES, *VLLM_COUNTERS):
        assert (f"vllm:{name}", labels) in found
    for name, bound in VLLM_HISTOGRAMS.items():
        assert (f"vllm:{name}_sum", labels) in found
        assert (f"vllm:{name}_count", labels) in found
        assert (f"vllm:{name}_bucket", labels | {("le", bound)}) in found
    for reason in ("stop", "length", "abort"):
        assert ("vllm:request_success_total", labels | {("finished_reason", reason)}) in found
    assert any(name == "vllm:cache_config_info" for name, _ in found)


def test_a_histogram_counts_a_value_at_a_bound_in_the_lower_bucket() -> None:
    metrics, name = EngineMetrics(), "vllm:request_num_preemptions"
    for value in (0.5, 1.0, 1.5, 2.5):
        metrics.meters.observe(name, value)
    counts = [total(metrics, f"{name}_bucket", le=bound) for bound in ("1.0", "2.0", "3.0", "+Inf")]
    assert counts == [2, 3, 4, 4]
    assert total(metrics, f"{name}_sum") == 5.5


def test_after_lost_messages_no_metric_is_made_up(session: Messages) -> None:
    whole = reduced(session)
    metrics = EngineMetrics()
    for number, (_, message) in enumerate(session):
        if isinstance(message, wire.Snapshot):
            metrics.join(message)
        elif 150 <= number < 200:
            continue
        else:
            if number == 200:
                metrics.lose(50)
            metrics.apply(message)
    assert total(metrics, "stepscope_telemetry_lost_total") == 50
    # A gap that spans the loss would be longer than any real one.
    of_vllm = ("inter_token_latency_seconds_sum", "time_to_first_token_seconds_count")
    for name in ("stepscope_steps_total", *(f"vllm:{each}" for each in of_vllm)):
        assert total(metrics, name) < total(whole, name)


@pytest.mark.parametrize("num_known", [0, 60])
def test_the_metrics_count_messages_that_never_come_as_lost(
    session: Messages, num_known: int
) -> None:
    """And none that the snapshot includes with which the metrics begin."""
    metrics, missing = EngineMetrics(), range(100, 130)
    follower = TelemetryFollower(None, metrics)  # type: ignore[arg-type]
    info = next(m for _, m in session if isinstance(m, wire.EngineInfo))
    follower.join(SessionState(info=info, time_ns=0, step=-1).snapshot(num_known - 1))
    num_steps = 0
    for number, (_, message) in enumerate(session):
        if number in missing:
            continue
        num_steps += number >= num_known and isinstance(message, wire.StepRecord)
        topic = wire.TOPICS[type(message)]
        follower.receive([topic, wire.sequence_frame(number), wire.encode(message)])
    assert total(metrics, "stepscope_telemetry_lost_total") == len(missing)
    assert total(metrics, "stepscope_steps_total") == num_steps


def test_a_scrape_of_a_real_server_counts_its_requests(
    live_engine: Any, http_server: Callable[..., Any]
) -> None:
    server = http_server(
        "serve", "--http-for", live_engine.endpoint.control, "--served-model-name", "sim"
    )
    body = {"prompt": [3] * 40, "max_tokens": 5, "ignore_eos": True}
    for _ in range(3):
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
    httpx.get(f"{server.url}/nothing")
    response = httpx.get(f"{server.url}/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = samples(response.text)
    labels = frozenset({("model_name", "sim"), ("engine", "0")})
    assert found["vllm:prompt_tokens_total", labels] == 120
    assert found["vllm:generation_tokens_total", labels] == 15
    assert found["vllm:prefix_cache_hits_total", labels] == 64
    assert found["vllm:time_to_first_token_seconds_count", labels] == 3
    finished = labels | {("finished_reason", "length")}
    assert found["vllm:request_success_total", finished] == 3
    assert found["stepscope_engine_up", frozenset()] == 1
    assert found["stepscope_telemetry_lost_total", labels] == 0
    other = frozenset({("path", "other"), ("status", "404")})
    assert found["stepscope_http_responses_total", other] == 1
    assert httpx.post(f"{server.url}/reset_prefix_cache").status_code == 200


def test_the_http_server_exports_the_state_of_the_configured_alert_rules(
    live_engine: LiveEngine, http_server: Callable[..., Any], tmp_path: Path
) -> None:
    config = tmp_path / "rules.toml"
    config.write_text('[[alerts]]\nwhen = "silent < 3600s"\n')
    served = http_server(
        "serve", "--http-for", live_engine.endpoint.control, STEPSCOPE_CONFIG=str(config)
    )
    name = live_engine.endpoint.name
    sample = f'stepscope_alert_firing{{engine="{name}",rule="silent < 3600s"}} 1.0'
    wait_for(lambda: sample in httpx.get(f"{served.url}/metrics").text, "the rule fires")


def test_metrics_of_an_engine_without_telemetry_are_absent_not_zero(session: Messages) -> None:
    metrics = reduced(session)
    metrics.info = msgspec.structs.replace(metrics.info, control_endpoint="ipc:///run/alpha")
    names = {name for name, _ in samples(Exposition(metrics, "sim").write(0).decode())}
    assert {"vllm:cache_config_info", "stepscope_engine_up"} <= names
    unknown = ("vllm:prefix", "vllm:num", "vllm:prompt", "vllm:time", "stepscope_steps", "_kv_")
    assert not [name for name in names if any(part in name for part in unknown)]


def test_the_shipped_grafana_board_and_alert_rules_use_existing_metrics(session: Messages) -> None:
    text = Exposition(reduced(session), "").write(0).decode()
    monitoring = Path(__file__).parents[2] / "docs" / "monitoring"
    json.loads((monitoring / "grafana.json").read_text())
    for file in ("grafana.json", "rules.yml"):
        names = set(re.findall(r"(?:vllm:|stepscope_)[a-z_0-9]+", (monitoring / file).read_text()))
        assert len(names) > 5
        for name in names:
            assert f"# TYPE {re.sub('_(bucket|count)$', '', name)} " in text, file


@pytest.mark.parametrize(("levels", "num_kept"), [({}, None), ({"slo_itl_ms": 0.001}, 0)])
def test_requests_within_levels_are_counted_by_the_levels_of_the_engine(
    session: Messages, levels: dict[str, float], num_kept: int | None
) -> None:
    info = next(message for _, message in session if isinstance(message, wire.EngineInfo))
    metrics = EngineMetrics()
    metrics.apply(msgspec.structs.replace(info, **levels))
    for _, message in session:
        if not isinstance(message, wire.EngineInfo):
            metrics.apply(message)
    assert (metrics.ttft_s, metrics.itl_s) == (0.5, 1e-6 if levels else 0.05)
    kept = metrics.meters.registry.get_sample_value("stepscope_requests_within_levels_total")
    assert kept == num_kept if levels else kept


def test_cached_tokens_are_those_of_the_admission_however_late_its_rows_come() -> None:
    knobs = Knobs(batching="static", max_num_seqs=8)
    workload = SimulatedWorkload(rate=9.0, document_share=0.5, document_tokens=600)
    static = simulate(seed=5, num_steps=400, knobs=knobs, workload=workload, num_blocks=512)
    events = [event for _, message in static for event in getattr(message, "events", [])]
    cached: dict[int, int] = {}
    for event in events:
        if isinstance(event, wire.Admitted):
            cached.setdefault(event.request_id, event.num_cached_tokens)
    begun = {event.request_id for event in events if isinstance(event, wire.FirstToken)}
    expected = sum(cached[request] for request in begun)
    assert total(reduced(static), "vllm:prompt_tokens_cached_total") == expected > 0
