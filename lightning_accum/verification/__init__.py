"""Verifies a module: :func:`verify` and its :class:`Report`."""
