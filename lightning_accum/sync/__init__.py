"""When gradients are reduced over the ranks: one small object for each engine."""
