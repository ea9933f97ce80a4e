"""Work to serve: corpora, recorded traces, seeded mixes, and who sends them. Free of torch.

May import: engine.client, engine.protocol, engine.protocol.settings, engine.transport.
A new trace format goes into `traces.py`, a new kind of arrivals into `arrivals.py`.
"""
