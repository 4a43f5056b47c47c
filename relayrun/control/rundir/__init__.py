"""The run directory: names, records and triggers. Standard library only."""
