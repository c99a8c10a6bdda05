"""The model: a Llama in plain torch, the files it is read from, and its tokenizer."""
