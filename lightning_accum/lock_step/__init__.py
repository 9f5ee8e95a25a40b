"""Micro-batches that take turns, and wait for each other."""
