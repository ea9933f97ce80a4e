"""The inference engine: scheduler, KV cache, model runner, telemetry and control.

Importing this package imports nothing else; `wire`, `commands`, `config` and `workload` never
import torch, so that a laptop without it can watch, record and load an engine.
"""
