"""The user's settings: config file, keys of the dashboard, and what is kept between runs.

It also has the errors that end a command.
May import: engine.http, engine.protocol, recordings, recordings.alerts, recordings.state.
A new key is a row in `action_table.py`; a new preference a field in `settings.py`.
"""
