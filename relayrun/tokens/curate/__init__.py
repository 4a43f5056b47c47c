"""Curation across documents: duplicates, and text of evaluations, are removed.

    dedup       the stages, task by task, in datatrove's blocks
    dedup_jobs  the stages of a data set on this machine or as Slurm arrays, their memory and their status

In: the documents of a metadata folder, behind the steps of its YAML. Out: a folder of .jsonl.gz that `relayrun dumps
prepare` reads. See `relayrun help clean`.
"""

from relayrun.tokens.tokenize.processes import use_one_thread

use_one_thread()  # before these modules import Arrow, whose threads would keep workers from being forks
