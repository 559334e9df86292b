"""How a worker's model is trained: one worker at a time or in stacks, with the tensors that all processes share."""
