"""The Triton kernels, one per file, each with the function that prepares its launch."""
