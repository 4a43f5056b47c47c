"""Dotted names that the record knows: names that users write, and programs that jobs start with `python -m`.

This is the only list of dotted names in the recorder. A name that moves is changed here, in the commit that moves it.
"""

from __future__ import annotations

USERS = {
    "relayrun:__version__": "a user reads the version",
    "relayrun.client:step_done": "a program of the trainer `command` reports an iteration",
    "relayrun.client:checkpoint_done": "a program of the trainer `command` reports a checkpoint",
    "relayrun.client:should_save": "a program of the trainer `command` asks whether to save",
    "relayrun.client:should_leave": "a program of the trainer `command` asks whether to leave",
    "relayrun.client:checkpoint": "a program of the trainer `command` asks for its checkpoint",
    "relayrun.train.hooks:Hook": "base class of hooks (`training.hooks`)",
    "relayrun.train.hooks:HookContext": "the argument of `Hook.setup`",
    "relayrun.train.hooks:StepStart": "the argument of `Hook.before_step`",
    "relayrun.train.hooks:Gradients": "the argument of `Hook.before_update`",
    "relayrun.train.hooks:Step": "the argument of `Hook.after_step`",
    "relayrun.train.hooks:ValidationResult": "the argument of `Hook.at_evaluation`",
    "relayrun.train.hooks:Action": "an action of a verdict of `Hook.before_update`",
    "relayrun.train.hooks:UpdateVerdict": "the result of `Hook.before_update`",
    "relayrun.train.hooks:Rollback": "the argument of `Hook.at_rollback`",
    "relayrun.train.hooks:CheckpointCommit": "the argument of `Hook.after_save`",
    "relayrun.train.hooks:AttemptOutcome": "the argument of `Hook.at_end`",
    "relayrun.train.model.attention:CausalAttention": "attention of layers of one's own (`model.spec`)",
    "relayrun.tokens.order.datasets:DatasetSpec": "the argument of an order of one's own (`data.order`)",
    "relayrun.tokens.order.datasets:Dataset": "protocol of a data set of one's own",
    "relayrun.tokens.order.sample_rows:SampleRow": "a data set of one's own returns a row with a loss mask",
    "relayrun.tokens.order.sampler:Stream": "protocol of a stream of one's own",
    "relayrun.train.export.model_mapping:ModelMapping": "a mapping of one's own (`model.mapping`)",
    "relayrun.train.export.model_mapping:Weight": "a row of a mapping of one's own",
    "relayrun.train.export.model_mapping:QKV": "a join of a mapping of one's own",
    "relayrun.train.export.model_families:LLAMA": "a mapping to change",
    "relayrun.train.export.model_families:ATTENTION_PREFIX": "a part of a mapping to change",
    "relayrun.train.export.model_families:LAYER_PREFIX": "a part of a mapping to change",
    "relayrun.train.export.model_families:QWEN3": "a mapping to change",
    "relayrun.train.export.model_families:MIXTRAL": "a mapping to change",
    "relayrun.train.export.model_families:APERTUS": "a mapping to change",
    "relayrun.tokens.streams:open": "parquet files as tables, in a notebook",
    "relayrun.tokens.tokenize:MegatronTokenWriter": "the last step of a datatrove pipeline",
    "relayrun.tokens.tokenize.options:TokenizeOptions": "the options of a tokenization, named in the documentation",
    "relayrun.errors:log_to_stderr": "a program prints warnings of the package",
    "relayrun.errors:RelayrunError": "a program catches errors of the package",
    "relayrun.cli:main": "a script runs a command",
}
"""Dotted name, and what a user does with it."""

PROGRAMS = {
    "relayrun": "the command",
    "relayrun.cli": "the command, for launchers",
    "relayrun.control.chain": "supervisor",
    "relayrun.control.agent": "agent of a node",
    "relayrun.control.agent.node_facts": "facts of a node",
    "relayrun.control.agent.spawn_server": "start server of a foreign trainer",
    "relayrun.control.agent.step_per_node": "starter of steps",
    "relayrun.control.scheduler.local_srun": "starter of ranks on one machine",
    "relayrun.config.compose.writable": "check of outputs, for scripts",
    "relayrun.tokens.mixture.stream_worker": "worker of a stream",
    "relayrun.lab.faults.processes": "signals to parts of a job",
    "relayrun.train.export.evaluate": "evaluation job",
    "relayrun.train.export.job_environment": "surroundings of an export job",
    "relayrun.lab.gpucheck.check": "part of a GPU check",
    "relayrun.lab.gpucheck.programs.kernels": "GPU check: kernels",
    "relayrun.lab.gpucheck.programs.device": "GPU check: device",
    "relayrun.watch.send_notices": "sender of notices",
    "relayrun.train.reporting.tracker_feed": "feeder of a tracker",
    "relayrun.submit.megatron_lm.programs.parse_flags": "parser of Megatron-LM's flags",
    "relayrun.tokens.tokenize": "tokenization, for scripts",
    "relayrun.train": "rank",
    "relayrun.train.mirror.sync": "copier of checkpoints",
    "relayrun.train.fork_server": "fork server of ranks",
    "relayrun.train.gpu_health": "health of GPUs",
}
"""Module that `python -m` starts, and its role. The record has the role in the place of the module."""

HOST = {"supervisor", "starter of steps", "starter of ranks on one machine", "facts of a node", "agent of a node"}
"""Roles of programs that need the standard library alone."""

FORMER = {"relayrun.data.mock:MockDataset"}
"""Names of earlier versions that texts of the package still hold."""
