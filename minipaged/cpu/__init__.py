"""The fast path of a processor: C++ kernels, built on first use. Plain torch serves where there are none.

accelerate.py is the only door. From there: modules.py (what a model becomes), backend.py (what attention
becomes), kernels.py (the calls), csrc/ (the C++), abi.py and build.py (how the two fit together),
calibrate.py (which products are the fastest here), packing.py (weights in the order in which they are read).
"""
