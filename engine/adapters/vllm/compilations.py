"""Notes the kernels that Triton compiles on the engine's thread while vLLM serves.

It listens where Triton itself tells how long it compiled what. vLLM's own `--jit-monitor-mode` uses
other hooks. With several workers, they compile in their own processes, and nothing is known here.
"""

import sys
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from stepscope.engine.adapters.attached.attachment import Attachment
from stepscope.engine.adapters.attached.hold_ups import HoldUps


def hook(attachment: Attachment, hold_ups: HoldUps) -> None:
    """Listen until stepscope detaches, if Triton is loaded and tells."""
    compilation = getattr(sys.modules.get("triton.knobs"), "compilation", None)
    if not hasattr(compilation, "listener"):
        return

    def around(before: Callable[..., Any] | None) -> Callable[..., Any]:
        def stepscope_listener(*args: Any, **told: Any) -> Any:
            attachment.guard(lambda: _note(hold_ups, told))
            return None if before is None else before(*args, **told)

        return stepscope_listener

    attachment.hooks_on(compilation).wrap("listener", around)


def _note(hold_ups: HoldUps, told: dict[str, Any]) -> None:
    if not hold_ups.is_engines_thread:
        return
    ns = int(told["times"].total) * 1000
    hold_ups.add("jit", monotonic_ns() - ns, ns, str(getattr(told["src"], "name", "")))
