"""Notices: messages to people about a run, and the record of their delivery.

In: the records of the run directory, the notice policy. Out: files in `notices/`, messages by mail, webhook or
command. Standard library only. `relayrun help notify` explains it.
"""
