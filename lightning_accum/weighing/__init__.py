"""The weight of a micro-batch: what the mean of its loss was divided by."""
