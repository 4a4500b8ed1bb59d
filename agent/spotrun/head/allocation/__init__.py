"""Which job has which devices: what to ask (`demand`), the answer (`allocate` and its parts), what follows. Pure."""
