"""The drill: faults that a chain must survive, as one table for tests and for people."""
