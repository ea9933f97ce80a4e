"""Text to token ids and back: the tokenizer, stop strings, the text of outputs. Needs no torch.

May import: engine.protocol.
A new way to decode tokens, or to stop at a text, goes into this package.
"""
