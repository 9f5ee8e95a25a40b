"""LightningModules in the shapes of public repositories: what a window should do with each. Rows are only added."""
