"""Programs that another Python runs: the ranks', which may have no relayrun."""
