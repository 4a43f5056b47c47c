"""Run a module of relayrun on the host's Python: `python3 run_module.py MODULE [ARGUMENT ...]`.

`python3 -m` puts the working folder in front of the search path, where another `relayrun` may lie, and the option
against it, `-P`, came with Python 3.11. This file imports from the folder in which it lies, whatever the version and
the environment.
"""

import runpy
import sys
from os.path import abspath, dirname

folder = dirname(abspath(__file__))
if sys.path and abspath(sys.path[0]) == folder:
    del sys.path[0]
sys.path.insert(0, dirname(dirname(folder)))
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
