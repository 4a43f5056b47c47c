"""Commands that set up and test an installation.

help    help, init
lab     gpu-check, drill, trial, site probe
"""
