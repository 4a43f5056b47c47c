"""Agents: one process on each node starts the ranks, watches them, and restarts them (`chain.recovery: node`).

In it: the agent of a node, the coordinator of all agents, their messages, restarts, hangs, node health. In:
`plan.json`, the messages of agents and ranks. Out: running ranks, records of restarts, findings about nodes. Standard
library only. `relayrun help recovery`, `relayrun help spare-nodes`, `relayrun help hangs` and `relayrun help
node-health` explain it.
"""
