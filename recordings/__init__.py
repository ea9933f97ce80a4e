"""Sessions without a screen: receive, reduce, store, read and replay the telemetry of engines.

May import: engine.protocol, recordings.session, recordings.state.
New code goes into the room that owns its subject. Here are `figures.py`, the table of all figures,
`packing.py`, steps in little room, and the errors that all rooms may raise.
"""
