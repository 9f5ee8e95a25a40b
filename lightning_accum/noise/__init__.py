"""The gradient noise scale: how large a window is worth having."""
