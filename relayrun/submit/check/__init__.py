"""What can be known of a run before anything is queued: one module a subject, all findings at once."""
