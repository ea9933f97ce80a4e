"""`ModelDescription`: what is told of a loaded model."""

import msgspec


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator is told of the model; the fields are `EngineInfo`'s."""

    model: str
    architecture: str
    dtype: str
    device: str
    implementation: str
    attention_backend: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_parameters: int
    weight_bytes: int
    flops_per_token: int
