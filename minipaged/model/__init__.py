"""The model: a Llama in plain torch, where its weights go, its tokenizer and its chat template."""
