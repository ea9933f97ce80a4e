"""Parses, runs and answers OpenAI's requests, with vLLM's additions.

May import: engine.client, engine.http, engine.protocol, engine.protocol.settings.
Add a request field to `requests.py`, then to `sampling.py`.
"""
