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
    "relayrun.training.hooks:Hook": "base class of hooks (`training.hooks`)",
    "relayrun.training.hooks:Context": "the argument of `Hook.setup`",
    "relayrun.training.hooks:StepStart": "the argument of `Hook.before_step`",
    "relayrun.training.hooks:Gradients": "the argument of `Hook.before_update`",
    "relayrun.training.hooks:Step": "the argument of `Hook.after_step`",
    "relayrun.training.hooks:Evaluated": "the argument of `Hook.at_evaluation`",
    "relayrun.training.hooks:Action": "an action of a verdict of `Hook.before_update`",
    "relayrun.training.hooks:Verdict": "the result of `Hook.before_update`",
    "relayrun.training.hooks:Rewind": "the argument of `Hook.at_rewind`",
    "relayrun.training.hooks:Commit": "the argument of `Hook.after_save`",
    "relayrun.training.hooks:Outcome": "the argument of `Hook.at_end`",
    "relayrun.training.model.attention:CausalAttention": "attention of layers of one's own (`model.spec`)",
    "relayrun.data.order.spec:DatasetSpec": "the argument of an order of one's own (`data.order`)",
    "relayrun.data.order.samples:Dataset": "protocol of a data set of one's own",
    "relayrun.data.rows:Row": "a data set of one's own returns a row with a loss mask",
    "relayrun.data.order.lanes:Stream": "protocol of a stream of one's own",
    "relayrun.data.streams:open": "a user opens a stream of text in a program",
    "relayrun.export.mapping.model_mapping:ModelMapping": "a mapping of one's own (`model.mapping`)",
    "relayrun.export.mapping.model_mapping:Weight": "a row of a mapping of one's own",
    "relayrun.export.mapping.joins:QKV": "a join of a mapping of one's own",
    "relayrun.export.mapping.llama:LLAMA": "a mapping to change",
    "relayrun.export.mapping.llama:ATTENTION": "a part of a mapping to change",
    "relayrun.export.mapping.llama:OF": "a part of a mapping to change",
    "relayrun.export.mapping.qwen3:QWEN3": "a mapping to change",
    "relayrun.export.mapping.mixtral:MIXTRAL": "a mapping to change",
    "relayrun.export.mapping.apertus:APERTUS": "a mapping to change",
    "relayrun.tokenization:MegatronTokenWriter": "the last step of a datatrove pipeline",
    "relayrun.tokenization.datatrove.executor:KillAwareExecutor": "an executor of datatrove pipelines",
    "relayrun.tokenization.options:TokenizeOptions": "the options of a tokenization, named in the documentation",
    "relayrun.errors:log_to_stderr": "a program prints warnings of the package",
    "relayrun.errors:RelayrunError": "a program catches errors of the package",
    "relayrun.cli:main": "a script runs a command",
}
"""Dotted name, and what a user does with it."""

PROGRAMS = {
    "relayrun": "the command",
    "relayrun.cli": "the command, for launchers",
    "relayrun.chain": "supervisor",
    "relayrun.agent": "agent of a node",
    "relayrun.agent.node_facts": "facts of a node",
    "relayrun.agent.start_server": "start server of a foreign trainer",
    "relayrun.agent.steps": "starter of steps",
    "relayrun.scheduler.tasks": "starter of ranks on one machine",
    "relayrun.config.writable": "check of outputs, for scripts",
    "relayrun.data.stream_worker": "worker of a stream",
    "relayrun.demo": "demo",
    "relayrun.drill.killed": "supervisor that is killed",
    "relayrun.drill.processes": "signals to parts of a job",
    "relayrun.drill.taken_over": "supervisor that is overtaken",
    "relayrun.export.evaluate": "evaluation job",
    "relayrun.export.surroundings": "surroundings of an export job",
    "relayrun.gpucheck.part": "part of a GPU check",
    "relayrun.gpucheck.programs.attention": "GPU check: attention",
    "relayrun.gpucheck.programs.bandwidth": "GPU check: bandwidth",
    "relayrun.gpucheck.programs.batch": "GPU check: batch",
    "relayrun.gpucheck.programs.device": "GPU check: device",
    "relayrun.gpucheck.programs.export": "GPU check: export",
    "relayrun.gpucheck.programs.host_copy": "GPU check: host copy",
    "relayrun.gpucheck.programs.models": "GPU check: models",
    "relayrun.monitoring.deliver": "sender of notices",
    "relayrun.monitoring.trackers.feed": "feeder of a tracker",
    "relayrun.submit.megatron_lm.programs.parse_flags": "parser of Megatron-LM's flags",
    "relayrun.tokenization": "tokenization, for scripts",
    "relayrun.tokenization.merges": "dumps that are to be merged, for scripts",
    "relayrun.tokenization.site": "site of a tokenization, for scripts",
    "relayrun.training": "rank",
    "relayrun.training.checkpoint.mirror": "copier of checkpoints",
    "relayrun.training.fork_server": "fork server of ranks",
    "relayrun.training.node_gpus": "health of GPUs",
    "relayrun.training.node_probe": "probe of a node",
}
"""Module that `python -m` starts, and its role. The record has the role in the place of the module."""

HOST = {"supervisor", "starter of steps", "starter of ranks on one machine", "facts of a node", "agent of a node"}
"""Roles of programs that need the standard library alone."""

FORMER = {"relayrun.data.mock:MockDataset"}
"""Names of earlier versions that texts of the package still hold."""
