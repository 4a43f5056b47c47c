"""`relayrun gpu-check`: measure what this machine's GPUs do with relayrun, part by part, each with a target.

check, part, report              runs the parts, each in a process of its own; the table with targets
setup, runs                      what parts are given; programs and training runs on this machine
performance, resume, models      the parts
cluster                          the check as a Slurm job on a site
programs                         the programs and hooks that run on ranks (they import torch)

Input: a device. Output: a JSON file and a table; see docs/gpu-check.md.
"""
