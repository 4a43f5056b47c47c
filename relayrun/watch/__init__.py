"""What happened in a run, for people: tables, curves, pictures."""
