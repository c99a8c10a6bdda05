"""Compiling the kernels ahead of time and reading what the compiler made of them; needs Triton, not a GPU.

compile.py    a launch -> Triton's IR, PTX, machine code, resource usage
loads.py      which load belongs to which argument
listing.py    loops, load widths and matrix instructions in a listing
occupancy.py  programs one multiprocessor can hold
report.py     all of it for one kernel and target
table.py      printed
"""
