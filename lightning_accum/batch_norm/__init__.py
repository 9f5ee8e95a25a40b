"""BatchNorm that sees the whole of a split batch."""
