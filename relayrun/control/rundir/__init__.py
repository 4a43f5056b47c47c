"""The run directory: the names of its files, its records, and the triggers that people touch.

Every process of a run reads and writes here: the submit, the supervisor, the agents, rank 0, and the commands of a
login node. A record is one JSON object, or one line of a JSON Lines file, and has one writer. A file appears whole or
not at all, and a torn last line is ignored.

In: `plan.json`, which a submit writes, and the records of the attempts. Out: decisions of `chain` and `agent`, and the
status for people. `run` and `attempt` name the files; the other modules hold one kind of record each. Standard library
only. `relayrun help run-directory` lists every file.
"""
