"""Programs that the ranks execute, and how a chain follows one that knows nothing of it. Standard library only."""
