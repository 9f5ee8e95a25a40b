"""LightningModules in the shapes of public repositories: what a window should do with each, and what it does today."""
