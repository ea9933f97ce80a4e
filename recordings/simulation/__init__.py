"""Simulated runs beside recorded ones: their figures, their files, what a recording would replay.

May import: engine.protocol, engine.protocol.settings, engine.simulation,
  engine.simulation.virtual, recordings, recordings.compare.side, recordings.export,
  recordings.figures, recordings.file, recordings.file.writing, recordings.state.series.
What a simulation reads from a recording, or makes of its steps, goes here.
"""
