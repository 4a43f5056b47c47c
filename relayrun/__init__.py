"""Language-model pretraining on Slurm as a relay of jobs that never loses work.

What lies where. A room imports only rooms that stand below it in this list, which a test reads from here:

    api               what the commands do, for programs: submit, wait, status, stop
    cli               the `relayrun` command: its verbs in five groups
    lab               experiments on an installation: planted faults, checks of GPUs, text to try
    checkpoints       checkpoints of any program: saved, verified, kept
    loader            the data of a run in a training program of one's own
    submit            from a config to a queued job
    watch             what happened, for people: status, report, goodput, messages
    train             the program that a rank executes: loop, model, checkpoints, export
    tokens            from files of text to the batches of a rank
    config.compose    from YAML files to one checked config
    control           what decides and survives: chain, agents, trainers, scheduler, run directory
    config.sections   the settings of a run
    trust             whose a file is, and whether it may start a program
    slurmtime         durations as Slurm writes them
    places            the code, the files that belong to it, and the project
    masking           secrets in text that people see
    client            what a foreign program may say to the chain, and hear; one file that may be copied
    publishing        outputs of commands, which appear whole or not at all
    files             files that survive a kill
    leftovers         temporary names, locks, and the removal of what killed processes left
    errors            the errors that are raised on purpose
    progress          the line on a terminal that says how far a command is
    terminal          text from files and jobs, made harmless for a terminal
"""

__version__ = "0.2.0"
