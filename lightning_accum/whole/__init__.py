"""Loader batches that run whole with less memory."""
