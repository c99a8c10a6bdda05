"""The fast path of a processor: C++ kernels, built on first use. Plain torch serves where there are none."""
