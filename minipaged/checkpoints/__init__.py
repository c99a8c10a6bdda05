"""Models as they come in files: GGUF and Hugging Face folders, read as a stranger's, whole or not at all."""
