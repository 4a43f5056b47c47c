"""From a run config to a queued job: what is checked, what is frozen, and the job that is made of it."""
