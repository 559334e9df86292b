"""Parameter rows, the training step, random draws, and the component registry."""
