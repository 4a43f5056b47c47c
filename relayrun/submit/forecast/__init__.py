"""What a run will need, from formulas and from what was measured before."""
