"""What `stepscope serve` says once its engine answers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.engine import serve as engine_serve
from stepscope.engine.config import Limits
from stepscope.engine.endpoints import Endpoint
from stepscope.engine.simulated import simulated_info
from stepscope.tui.commands import serve as serve_command
from stepscope.tui.commands.connect import choose


@pytest.mark.parametrize("endpoint", ["e1", "/run/x1", "/run/e1", "tcp://127.0.0.1:5791"])
def test_the_address_to_watch_is_that_of_the_engine_whatever_it_is_called(
    endpoint: str,
    runtime_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_folder))
    control = Endpoint.parse(endpoint).control
    info = simulated_info(
        Limits(max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64), 8, 16, seed=1
    )
    info = msgspec.structs.replace(info, name="e1", control_endpoint=control)

    def started(*arguments: Any, ready: Callable[..., None], **options: Any) -> None:
        ready(info)

    monkeypatch.setattr(engine_serve, "serve", started)
    monkeypatch.setattr(serve_command, "prepare_process", lambda: None)
    serve_command.serve({}, exit_with_stdin=False)
    said = capsys.readouterr().out.partition("stepscope top ")[2].split()[0]
    assert choose(said, "{}").control == control
    assert (said == "e1") == (endpoint == "e1")
