"""What runs on the ranks: programs that measure and write JSON, and hooks of the check's own training runs."""
