"""The OpenAI-compatible HTTP server: a process of its own that talks to an engine's sockets.

It translates and nothing else: tokens, templates, stop strings and texts are the engine's work.
Nothing in here needs torch, and nothing but `settings` may be imported where Starlette is missing.
"""
