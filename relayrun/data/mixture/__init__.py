"""A folder of links to shards, so chosen that each dataset has its weight in tokens."""
