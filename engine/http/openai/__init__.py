"""OpenAI's requests and responses, with vLLM's additions: parsed, generated, streamed.

May import: engine.client, engine.http, engine.protocol, engine.protocol.settings.
A field of a request goes into `requests.py`, then `sampling.py`.
"""
