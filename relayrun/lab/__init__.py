"""Ranks killed every minute, nodes lost every ten: what training lost by it, and whether it changed anything."""
