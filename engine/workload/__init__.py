"""Work to serve: corpora, recorded traces, synthetic mixes, and their senders. Needs no torch.

May import: engine.client, engine.protocol, engine.protocol.settings, engine.transport.
A new trace format goes into `traces.py`, a new kind of arrivals into `arrivals.py`.
"""
