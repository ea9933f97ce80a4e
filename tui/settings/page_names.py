"""The screens of a dashboard by name, in the order of their keys."""

from typing import Literal, TypeAlias

Page: TypeAlias = Literal["live", "step", "request", "kv", "latency", "knobs", "compare", "fleet"]

# In the order of their keys: 1, 2, ...
PAGES: tuple[Page, ...] = (
    "live", "step", "request", "kv", "latency", "knobs", "compare", "fleet"
)  # fmt: skip
