"""Loader batches that ``training_step`` sees as a whole, whatever their loss does with it."""
