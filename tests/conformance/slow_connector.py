"""A KV connector that moves nothing: whoever drives the scheduler says when a transfer is done."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)


class SlowConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's side. `kv_transfer_params` are those of vLLM's own connectors."""

    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> tuple[int, bool]:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return 0, False
        return len(request.prompt_token_ids) - num_computed, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_tokens: int) -> None:
        if num_tokens:
            request.kv_transfer_params["do_remote_prefill"] = False

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        is_sent = bool((request.kv_transfer_params or {}).get("do_remote_decode"))
        return is_sent, {"remote_request_id": request.request_id} if is_sent else None

    request_finished_all_groups = request_finished

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...
