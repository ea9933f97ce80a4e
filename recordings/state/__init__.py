"""Rebuilds what is known of one engine (requests, KV blocks, pauses, clocks) from its telemetry.

A "session" is the sequence of telemetry messages of one engine. Also here: its lanes, events,
limits and latencies as series, and the texts of knobs and audit entries.

May import: engine.protocol.
New state of an engine, as derived from its messages, goes into `session.py` or one of its parts.
"""
