"""Basic building blocks: flat parameter vectors (rows), the training step, random draws, the component registry."""
