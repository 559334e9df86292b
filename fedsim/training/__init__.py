"""How the models of workers are trained in one process. Its modules, from what is known first to what uses it:

- task, shared_state, memory: what a run computes, the tensors that all processes share, and how much memory they take.
- batches, weights, client_rounds: which samples a worker trains on, its weight, and the start and end of its round.
- forward_functions, row_module: dropout masks in a forward pass, and a module whose parameters are views of a row.
- operations, stacked_module, sample_gradients: one module that computes the models of several workers at once.
- stack, stack_step, probe: workers that are trained together, one step of theirs, and which models allow it.
- capture, cuda_graphs: steps that are replayed as CUDA graphs.
- sequential, parallel_trainer, stacked: trainers that train one worker after another, average gradients over ranks in
  the backward pass, and train several workers at once.
"""
