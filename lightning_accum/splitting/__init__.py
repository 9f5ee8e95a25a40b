"""Loader batches as micro-batches: split, sort, trim, pack, run, and join the outputs."""
