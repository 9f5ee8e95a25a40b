"""Lightning's strategies with windows: a few lines for each engine. Their names are in ``package.py``."""
