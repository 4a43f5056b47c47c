"""Checks of a run before anything is queued. Each module checks one subject; all findings come at once.

    report           runs all checks; report_text: the result as text and JSON
    settings, slurm, programs, megatron_lm, data, storage, existing_run    the subjects
    findings         one finding (ok, warning or error), and the list of findings

In come a config, its plan and the run directory; out comes a `CheckReport`. Nothing is written. `relayrun help check`
explains it.
"""
