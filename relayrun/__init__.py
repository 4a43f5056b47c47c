"""Language-model pretraining on Slurm as a relay of jobs that never loses work.

What lies where. A package imports only packages that stand below it in this list, which a test reads from here:

    cli             the `relayrun` command, one module a verb
    demo            `make demo`: raw text to a trained model on one machine
    drill           faults that a chain must survive
    gpucheck        what GPUs do with relayrun: one command, part by part, with targets
    submit          from a run config to a queued job
    export          a checkpoint as a model that other programs read, and back; its evaluation
    training        the program that a rank executes: model, checkpoints, reports, the loop
    monitoring      where a run stands and what it cost, for people: status, report, goodput, trackers
    data            which tokens are sample k of a run; what a mixture takes; what was read
    shuffle         a global shuffle of a dataset on disk
    tokenization    text to token shards, dump by dump
    chain           what becomes of a run when a job ends, and the supervisor beside the ranks
    agent           what runs once a node, parent of its ranks, and starts them again inside the job
    trainers        programs that the ranks execute, and how a chain follows one that knows nothing of it
    scheduler       Slurm, or a queue on this machine
    rundir          the run directory: its file names, its records, its triggers
    shards          Megatron's token files
    config          the settings of a run, and how they are composed
    slurmtime       durations as Slurm writes them
    places          the code, the files that belong to it, and the project
    masking         what looks like a secret
    client          what a foreign program may say to the chain, and hear; one file that may be copied
    files           files that survive a kill
    errors          every error that is raised on purpose
"""

__version__ = "0.1.0"
