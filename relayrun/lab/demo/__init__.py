"""The demo: text that every machine has or generates, tokenized, mixed, trained and exported on one machine."""
