"""A loader batch that runs whole: the loss sees all of it, and memory holds less."""
