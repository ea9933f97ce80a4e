"""Simulates recorded sessions again under other knobs: forecasts, their figures and files.

May import: engine.protocol, engine.protocol.settings, engine.simulation,
  engine.simulation.virtual, recordings, recordings.compare.side, recordings.export,
  recordings.file, recordings.file.writing, recordings.state, recordings.state.series.
Code that feeds a simulation from a recording, or evaluates its steps, goes here.
"""
