"""The names of the dashboard's screens, in the order of the keys that open them."""

from typing import Literal, TypeAlias

Page: TypeAlias = Literal["live", "step", "request", "kv", "latency", "knobs", "compare", "fleet"]

# In the order of their keys: 1, 2, ...
PAGES: tuple[Page, ...] = (
    "live", "step", "request", "kv", "latency", "knobs", "compare", "fleet"
)  # fmt: skip
