"""Moving through time: steps, events, the worst stall, typed places.

May import: engine.protocol, recordings.attribution, recordings.history, recordings.live,
  recordings.state.series, tui.views, tui.views.frame.
A new way to a step goes here.
"""
