"""The guided tour: lessons in the dashboard, shown on a live engine.

May import: engine.client, engine.protocol, engine.protocol.settings, engine.transport,
  recordings.history, tui.views.
A new chapter is an entry in `chapters.py`.
"""
