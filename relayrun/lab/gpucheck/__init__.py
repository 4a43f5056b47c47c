"""`relayrun gpu-check`: measure training on this machine's GPUs, part by part, each with a target.

check, report                    runs the parts, each in its own process; the table with targets
setup, runs                      input of the parts; programs and training runs on this machine
kernels, resume, performance     the parts
programs                         the programs and hooks that run on ranks (they import torch)

Input: a device. Output: a JSON file and a table; see `relayrun help gpu-check`.
"""
