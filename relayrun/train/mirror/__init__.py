"""Copies of a run's checkpoints at a second destination, a folder or a URL, and back. Nothing here imports torch.

A pass copies what is missing, the newest first: at most so many bytes a second, on from where a killed pass has
stopped. Then every byte of the copy is read back and compared with the hashes of its commit, or, where a program saves
without any, with the file that was copied. Only then the copy is claimed. So a kill at any point leaves no false claim.

The newest copy is removed by no rule, and an older one only while that is whole.
"""
