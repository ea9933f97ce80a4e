"""The export chooser of the dashboard: what can be written, and the writing."""
