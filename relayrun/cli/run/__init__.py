"""Commands that start, change and end runs.

submit                submit, check, resume, launch
wrap                  of the same name
settings              config, diff, explain, adopt
sweeps_and_stages     sweep, stages
stop                  save, stop, cancel
"""
