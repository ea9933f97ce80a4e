"""The dashboard and the `stepscope` command. Free of torch.

May import: nothing of ours.
A new thing goes into the room that owns its noun; this folder holds rooms only.
"""
