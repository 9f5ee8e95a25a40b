"""The command ``lightning-accum demo``: the same training three ways, and what becomes of it."""
