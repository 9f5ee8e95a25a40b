"""Loader batches as micro-batches: split, sorted, trimmed, packed, run, and put together again."""
