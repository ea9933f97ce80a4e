"""Prefill and decode apart: a prefill engine hands a request over once it has its first token.

`HandOver` belongs to the engine's thread of the prefill engine, `DecodeLink` asks the decode engine
and passes its tokens on. Keys and values go by a `KVSender` and a `scheduling.step.KVReceiver`.
May import: engine.client, engine.loop, engine.protocol, engine.protocol.settings,
  engine.scheduling, engine.transport.
Another way for keys and values, over a network for example, is one file beside `shared_memory.py`.
"""
