"""Experiments on an installation: they submit small runs, disturb or measure them, and report the result.

faults          injects faults into a chain on a cluster and compares the result with an undisturbed run
gpucheck        measures whether training works on this machine's GPUs, and how fast
loss_oracle     compares each term of a config's loss in its layout with one rank; loss_terms computes them
site_probe      measures what a cluster does with jobs, for its site file
corpus          documentation and code of this Python as text to tokenize
small_run       makes and submits the small runs; compare_runs compares runs bit by bit

Input: a cluster or a machine. Output: a table, a JSON file and a page. In the package only `cli/` imports it.
"""
