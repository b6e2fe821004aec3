"""Who does it: one file an actor. `host.py` and `simulated.py` are the only files that know what an actor runs on."""
