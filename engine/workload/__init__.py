"""Requests to serve: text corpora, recorded traces, synthetic mixes, and the code that sends them.
Needs no torch.

May import: engine.client, engine.protocol, engine.transport.
A new trace format goes into `traces.py`, a new way to draw arrivals into `arrivals.py`.
"""
