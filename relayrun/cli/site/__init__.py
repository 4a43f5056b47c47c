"""Commands that set up and test an installation.

new_project    init
completion     completion of commands in Bash, zsh and fish
lab            gpu-check, drill, site probe
"""
