"""A KV connector that moves nothing: each transfer only takes its time.

Whoever drives a scheduler alone says when a transfer is done. In a server a load takes
`load_s` of `kv_connector_extra_config`, and what was computed for another engine is kept `keep_s`.
`kv_transfer_params` are those of vLLM's own connectors.
"""

import time
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)


@dataclass
class Begun(KVConnectorMetadata):
    """Requests whose transfers begin with this step."""

    loads: list[str] = field(default_factory=list)
    sends: list[str] = field(default_factory=list)


class SlowConnector(KVConnectorBase_V1, SupportsHMA):
    """Both sides: the scheduler's, and the worker's with the clock."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = vllm_config.kv_transfer_config
        self._engine = config.engine_id
        self._load_s = config.get_from_extra_config("load_s", 0.5)
        self._keep_s = config.get_from_extra_config("keep_s", 1.0)
        self._begun = Begun()
        self._due: dict[tuple[str, str], float] = {}

    # The scheduler's side

    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> tuple[int, bool]:
        if not (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return 0, False
        return len(request.prompt_token_ids) - num_computed, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_tokens: int) -> None:
        if num_tokens:
            request.kv_transfer_params["do_remote_prefill"] = False
            self._begun.loads.append(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        begun, self._begun = self._begun, Begun()
        return begun

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        if not (request.kv_transfer_params or {}).get("do_remote_decode"):
            return False, None
        self._begun.sends.append(request.request_id)
        return True, {
            "do_remote_prefill": True,
            "remote_engine_id": self._engine,
            "remote_request_id": request.request_id,
        }

    request_finished_all_groups = request_finished

    # The worker's side

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        begun = self._get_connector_metadata()
        assert isinstance(begun, Begun)
        now = time.monotonic()
        self._due |= {("load", name): now + self._load_s for name in begun.loads}
        self._due |= {("send", name): now + self._keep_s for name in begun.sends}

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        done = [key for key, due in self._due.items() if due <= time.monotonic()]
        for key in done:
            del self._due[key]
        sent, loaded = ({name for kind, name in done if kind == each} for each in ("send", "load"))
        return sent, loaded

    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...
