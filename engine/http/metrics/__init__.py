"""The engine's telemetry as Prometheus metrics under vLLM's names.

May import: engine.client, engine.http, engine.protocol, engine.transport.
A new metric goes into the tables of `reducer.py`, and so does what it counts.
"""
