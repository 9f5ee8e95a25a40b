"""Whether the promise holds for a module: :func:`verify` and its :class:`Report`."""
