"""From a run config to a queued job.

    submission            checks a config, writes the run directory, queues one job
    check/                what a submit refuses or warns of
    run_plan, policies    plan.json and the records beside it, which the jobs read instead of the config
    cost                  node hours that a submit can use, and the question about them
    forecast              parameters, memory, hours, node hours and checkpoint sizes of a run
    initial_checkpoint    what a run begins from; code_snapshot: the code that it runs
    megatron_lm/          from settings and launchers to the command line of Megatron-LM
    launcher_overrides  variables of the Bash launchers as settings
    campaign, project, move_run          sweeps and stages; a new project; moves a run directory
In comes a checked config; out go a run directory and a job. `relayrun help check` and `relayrun help launchers`
explain it.
"""
