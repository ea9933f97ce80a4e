"""OpenAI's API with vLLM's additions: parses requests, runs them in the engine, writes the answers.

May import: engine.client, engine.http, engine.protocol, engine.protocol.settings.
Add a request field to `requests.py`, then to `job.py`; one that changes no answer to
`IGNORED_FIELDS`.
"""
