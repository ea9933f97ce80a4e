"""From text to token ids and back: the tokenizer, stop strings, the text of outputs. Free of torch.

May import: engine.protocol, engine.protocol.settings.
A new way to decode or to stop goes here.
"""
