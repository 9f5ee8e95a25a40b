"""Checkpoints: of unfinished windows, and written whole."""
