"""The machine a model runs on: device, precision, threads, environment variables.

May import: engine.protocol.settings, engine.scheduling.
Code that depends on the machine goes here.
"""
