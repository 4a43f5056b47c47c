"""Reports of an attempt while it trains: metrics, heartbeats, the environment, profiles, W&B and TensorBoard.

`liveness` imports the standard library alone and runs before torch is imported. Trackers run as processes of their
own (`tracker_feed`), which rank 0 starts. In: steps, saves and evaluations, as hooks. Out: files of the attempt and
what W&B and TensorBoard show. See `relayrun help logging` and `relayrun help monitoring`.
"""
