"""An attached vLLM that other machines can reach takes only clients with a key."""

from pathlib import Path

import pytest

from stepscope.engine.adapters.vllm.attachment import attach
from stepscope.engine.client.client import CommandRefused, ControlClient, EngineUnreachable
from stepscope.engine.protocol.settings.knobs import ConfigError
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.engine.transport.keys import KeyFolder, Role, read_credentials
from tests.adapters.played_vllm import PlayedScheduler
from tests.support.ports import free_port


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of vLLM's user."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "vllm"))


def test_without_a_key_an_address_for_other_machines_leaves_the_scheduler_unchanged() -> None:
    scheduler = PlayedScheduler("0.32.0", "chunked")
    before = vars(scheduler).copy()
    with pytest.raises(ConfigError, match="no key is authorised"):
        attach(scheduler, "tcp://0.0.0.0:5555")
    assert vars(scheduler) == before


def test_holders_of_keys_watch_or_steer_and_nobody_else_gets_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Endpoint, "is_private", False)
    address = f"tcp://127.0.0.1:{free_port()}"

    def holder(name: str, role: Role) -> Endpoint:
        KeyFolder().add(name, role, tmp_path / f"{name}.key", None)
        return Endpoint(address, read_credentials(tmp_path / f"{name}.key"))

    viewer = holder("vera", "viewer")
    scheduler = PlayedScheduler("0.32.0", "chunked")
    attachment = attach(scheduler, address)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "laptop"))
    change = {"max_num_batched_tokens": 32}
    try:
        with ControlClient(viewer) as client:
            assert client.info().engine == "vllm"
            with pytest.raises(CommandRefused, match="takes an operator's key"):
                client.set_knobs(change, "vera")
        with ControlClient(holder("otto", "operator")) as client:  # made while it runs
            client.set_knobs(change, "otto")
        assert scheduler.max_num_scheduled_tokens == 32
        with (
            ControlClient(address, timeout_s=1) as client,
            pytest.raises(EngineUnreachable, match="asks for a key"),
        ):
            client.info()
        assert [each.key for each in attachment.core.audit.last()] == ["vera", "otto"]
    finally:
        attachment.close()
