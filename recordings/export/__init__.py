"""Recordings for other programs. One module a format; none holds more than a part of a session."""
