"""The machine a model runs on: device, precision, threads, environment variables.

May import: kernels, engine.protocol.settings, engine.scheduling.
What differs between machines goes here.
"""
