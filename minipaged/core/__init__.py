"""Decides and computes: token ids, blocks and tensors. No text, no prompt, no tokenizer, no caller."""
