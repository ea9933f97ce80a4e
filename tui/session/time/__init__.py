"""Moves the cursor through time: to steps, events, the worst stall, and typed steps or times.

May import: engine.protocol, recordings.history, recordings.replay, recordings.session,
  recordings.state.series, tui.views, tui.views.frame.
A new way to reach a step goes here.
"""
