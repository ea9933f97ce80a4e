"""Receives the telemetry of a running engine: subscribing, gap recovery, earlier steps, recording.

May import: engine.adapters.metrics, engine.client, engine.protocol, engine.transport,
  recordings, recordings.file, recordings.file.writing, recordings.history.
Code that communicates with an engine goes here.
"""
