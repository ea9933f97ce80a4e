"""The MCAP container: the layout of chunks, indexes and records in a file.

A chunk here is a compressed part of a file.

May import: engine.protocol.
Code for the format, with which other programs must agree, goes here.
"""
