"""The live page of `minipaged serve`: the memory while it serves, drawn in a browser from frames."""
