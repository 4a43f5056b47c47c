"""Commands for checkpoints and models: `checkpoint` verifies and mirrors, `convert` exports and imports."""
