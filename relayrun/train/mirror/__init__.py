"""Copies of a run's checkpoints in a second folder, and their restore. Without torch.

A pass copies the missing checkpoints, newest first, and continues after a killed
pass. Then it reads every byte of a copy back and compares it with the hashes of the commit or, without hashes, with the
original file. Only then it claims the copy, so a kill at any point leaves no false claim.

No rule removes the newest copy, and an older copy is removed only while the newest is whole. See `relayrun help
mirror`.
"""
