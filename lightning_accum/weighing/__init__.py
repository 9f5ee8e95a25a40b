"""The weight of a micro-batch: the denominator of its mean loss."""
