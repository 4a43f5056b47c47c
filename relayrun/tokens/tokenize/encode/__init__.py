"""Texts to token ids: the tokenizer, the libraries that encode, and the proof that they agree."""
