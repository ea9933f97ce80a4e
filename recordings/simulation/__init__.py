"""Simulates recorded sessions again under other knobs: forecasts, their figures and files.

May import: engine.protocol, engine.simulation, recordings, recordings.compare,
  recordings.export, recordings.file, recordings.file.writing, recordings.session,
  recordings.state.
Code that feeds a simulation from a recording, or evaluates its steps, goes here.
"""
