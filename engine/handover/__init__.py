"""Prefill and decode in separate engines: a request moves to the decode engine after its first
token.

`EngineRole` makes what an engine needs for it. `HandOver` runs on the prefill engine's thread.
`DecodeLink` talks to the decode engine and forwards its tokens to clients. `shared_memory`
transfers keys and values.
May import: engine.client, engine.loop, engine.protocol, engine.scheduling, engine.transport.
To transfer keys and values in another way, for example over a network, add a file beside
`shared_memory.py`, with a sender like its own and a `scheduling.step.KVReceiver`.
"""
