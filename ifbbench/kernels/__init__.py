"""GPU kernels in Triton. Each file has one kernel, a plain torch twin that says what it computes, and its arithmetic.

Nothing is imported here: a run without a GPU does not need Triton. The functions take and return plain tensors. They
run on CUDA tensors, and on any under Triton's interpreter (`TRITON_INTERPRET=1`, set before Triton is imported).
"""
