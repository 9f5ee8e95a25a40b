"""LightningModules in the shapes of public repositories: what a window should do with each. Rows are added, never cut for length."""
