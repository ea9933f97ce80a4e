"""Recordings as files: reading and seeking, what a file says of itself, who holds it.

May import: engine.protocol, recordings, recordings.file.mcap, recordings.packing,
  recordings.state, recordings.state.series.
What reads a file goes here; what writes one, into `writing`; bytes of MCAP, into `mcap`.
"""
