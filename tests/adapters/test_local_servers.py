"""Servers on this machine are found by their ports, without disturbing other processes."""

import os
from pathlib import Path
from socket import create_server

from stepscope.engine.adapters.metrics.fetch import MetricsAddress
from stepscope.engine.adapters.metrics.local_servers import (
    LocalServer,
    LocalServers,
    listening_ports,
    without_attached,
)
from tests.support.engines.metrics_server import metrics_server

TEXT = (Path(__file__).with_name("metrics_texts") / "vllm-0.32.txt").read_bytes()


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def test_inference_servers_on_this_machine_are_found_and_other_servers_left_out() -> None:
    with (
        metrics_server(lambda: TEXT) as vllm,
        metrics_server(lambda: b"stepscope_steps_total 5\n") as ours,
        metrics_server(lambda: b"node_load1 5\n") as other,
        create_server(("127.0.0.1", 0)) as silent,
    ):
        ports = [port_of(vllm), port_of(ours), port_of(other), silent.getsockname()[1]]
        servers = LocalServers(lambda: [(port, None) for port in ports])
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
