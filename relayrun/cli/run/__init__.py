"""Commands that start, change and end runs.

submit                submit, check, resume, launch
adopt, wrap           of the same names
settings              config, diff, explain
sweeps_and_stages     sweep, stages
stop                  save, stop, cancel
"""
