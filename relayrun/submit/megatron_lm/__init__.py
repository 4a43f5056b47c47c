"""From a run config to the command line of Megatron-LM.

    command_line     the command of a rank, from settings, a launcher's arrays and `megatron_lm.args`
    flags            one flag with its source, and which of several flags holds
    checkout         a checkout of Megatron-LM: version, flags, and its parser's answer (programs/parse_flags)
    bash_arrays      flags in the Bash arrays of a launcher; bash_parser: the reader of Bash text

docs/megatron-lm.md and docs/megatron-flags.md explain it.
"""
