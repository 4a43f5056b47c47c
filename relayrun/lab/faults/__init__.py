"""Fault tests of `relayrun drill`: inject a fault into a running chain, and check how the chain ends.

table                the faults with their expected end, and the functions that cause them
target, processes    the running chain and cluster; signals to its processes
injection            a hook that causes faults inside ranks
experiment           one test: submit, inject, wait for the end, compare with the undisturbed run
session              a list of tests in a folder, and its report

Faults are explained in `relayrun help failure-modes`.
"""
