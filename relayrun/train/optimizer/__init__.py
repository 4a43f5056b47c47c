"""The optimizer and the learning rate of a rank, over megatron-core's gradient buffers.

`megatron_optimizer` has Adam, gradient norms and the schedule; `parameter_groups` has `optimizer.groups`;
`user_optimizer` takes any torch.optim.Optimizer; `muon` is Muon. In: a model stage and the section `optimizer`. Out:
updates, and a state that a checkpoint saves. See `relayrun help optimizers`.
"""
