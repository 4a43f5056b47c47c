"""Where jobs that an earlier version submitted look for their function: submitit pickles it by its place."""

from relayrun.tokens.tokenize.dumps_jobs import tokenize_dump

__all__ = ["tokenize_dump"]
