"""Commands that set up and test an installation.

new_project    init
completion     completion of commands in shells, by argcomplete
lab            gpu-check, drill, site probe
"""
