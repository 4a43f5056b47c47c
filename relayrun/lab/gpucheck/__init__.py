"""`relayrun gpu-check`: one command that says what this machine's GPUs do with relayrun, part by part, with targets."""
