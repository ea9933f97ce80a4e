"""Steps in little room: as a file and the memory hold them.

May import: engine.protocol.
A new way to pack a message goes here, with its unpacking beside it.
"""
