"""A program of the user's own as a trainer, told by settings what counts and how it is asked. Standard library only."""
