"""The demo: text that every machine has or makes, and what becomes of it."""
