"""What runs once a node where `chain.recovery` is `node`: the parent of the node's ranks, which starts them again.

Standard library only.
"""
