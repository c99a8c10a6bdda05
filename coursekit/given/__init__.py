"""What the exercises give to a learner: small parts around the one that is to be written.

An answer may import these, and nothing else of minipaged.
"""
