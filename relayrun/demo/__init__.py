"""The demo: real text that every machine has, and what is made of it."""
