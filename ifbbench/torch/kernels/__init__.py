"""GPU kernels in Triton. `tests.torch.kernels.references` has a plain PyTorch version of each.

Nothing is imported here, because a run without a GPU does not need Triton. The functions take and return plain tensors,
on CUDA devices, or on any device in Triton's interpreter (`TRITON_INTERPRET=1`, set before Triton is imported).
"""
