"""The OpenAI-compatible HTTP server: a separate process that talks to an engine's sockets.

It parses requests of OpenAI's API with vLLM's additions, runs them in the engine and writes the
answers; its `/metrics` tells the engine's telemetry under vLLM's names. Does not import torch.

May import: engine.client, engine.protocol, engine.transport.
Add a route to `app.py`; a request field to `requests.py`, then to `job.py`, or to
`IGNORED_FIELDS` if it changes no answer; a metric, and what it counts, to `metrics_reducer.py`.
"""
