"""Who may come in and how often: sockets, CURVE keys, roles, the gate, rate limits; no torch."""
