"""From a run config to the command line of Megatron-LM.

    command_line     the command of a rank, from settings, a launcher and `megatron_lm.args`
    flags            one flag with its source, and which of several flags holds
    checkout         a checkout of Megatron-LM: version, flags, and its parser's answer (programs/parse_flags)
    launcher_file    a launcher of others: the flags of the training that it starts, its variables and options
    bash_run         follows Bash without running it: bash_syntax (commands), bash_values (words), bash_test (tests)

`relayrun help megatron-lm` and `relayrun help megatron-flags` explain it.
"""
