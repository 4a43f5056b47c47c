"""What an attempt tells while it trains: metrics, heartbeats, timings, trackers, traces."""
