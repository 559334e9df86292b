"""Training of the workers' models in one process. Later modules use earlier ones:

- task, shared_state, memory: description of a run, tensors that all processes share, and their estimated size.
- batches, weights, client_rounds: samples and weight of a worker, and start and end of its round.
- forward_functions, row_module: dropout masks in a forward pass, and a module whose parameters are views of a row.
- operations, stacked_module, sample_gradients: a module that computes the models of several workers at once, and
  gradients of single samples.
- stack, stack_step, probe: workers that are trained together, one training step of a stack, and a trial run that finds
  out whether a model can be stacked.
- capture, cuda_graphs: steps that are replayed as CUDA graphs.
- sequential, parallel_trainer, stacked: trainers that train one worker after another, average gradients over ranks in
  the backward pass, or train several workers at once.
"""
