"""The config file, the keys and the table of actions, the state that is kept between runs, and
the errors that end a command.

May import: engine.http, engine.protocol, engine.protocol.settings, recordings.alerts,
  recordings.figures, recordings.state.series.
A new key is a row in `action_table.py`; a new preference a field in `settings.py`.
"""
