"""What copies of saves take of a node's memory."""

from __future__ import annotations

from relayrun.config.compose.schema import RunConfig
from relayrun.submit.saves import bytes_per_parameter
from relayrun.train.checkpoint.host_buffers import BUFFER_PIECE_BYTES, lay_out_buffers, pinned_bytes

COPY_BUFFER_BYTES = 1 << 26
"""Bytes of the buffers of which an estimate takes what a rank saves to be made, but for the largest one."""


def host_copy_bytes(config: RunConfig, parameters: int, vocabulary_size: int) -> int:
    """Estimate the bytes of host memory that the rank which saves most takes for its copies, by formula.

    What a checkpoint has is divided over the ranks that share a part of the model: by whole tensors, but for the state
    of the distributed optimizer, so the rank with the embedding has it all. On GPUs torch pins the memory, which it
    rounds up. `vocabulary_size`: padded.
    """
    if not config.checkpoint.async_save:
        return 0
    parallel = config.parallel
    width, state = bytes_per_parameter(config)
    own = parameters / parallel.tensor_model_parallel_size / parallel.pipeline_model_parallel_size
    replicas = config.data_parallel_size * parallel.context_parallel_size
    embedding = vocabulary_size * config.model.hidden_size / parallel.tensor_model_parallel_size
    if parallel.use_distributed_optimizer:
        largest = max(width * embedding, 4 * min(embedding, own / replicas))
        total = max(width * own / replicas, width * embedding) + state * own / replicas
    else:
        largest = 4 * embedding
        total = max((width + state) * own / replicas, largest)
    rest = max(0, round(total - largest))
    sizes = [round(largest), *[COPY_BUFFER_BYTES] * (rest // COPY_BUFFER_BYTES), rest % COPY_BUFFER_BYTES]
    lengths = lay_out_buffers(sizes, BUFFER_PIECE_BYTES)[1]
    return sum(pinned_bytes(lengths) if config.job.gpus_per_node else lengths)
