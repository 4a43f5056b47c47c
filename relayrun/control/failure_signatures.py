"""The table of failure signatures: what a line of a log means, and whose cause it is.

All trainers, strikes, `relayrun why`, STOP and notices use this one table. A line belongs to the first entry whose
pattern it matches: special entries stand before general ones. A site adds entries by `cluster.failure_signatures`, a
run by `chain.failure_signatures`; they stand before these in the plan. Standard library only.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

from relayrun.config.sections.chain import FailureSignature

_TABLE = r"""
gpu-lost :: node :: a GPU of this node has failed
    fallen off the bus|GPU is lost|Unable to determine the device handle for GPU|NVRM: Xid \S+ (?:48|62|63|64|74
    |79|92|94|95|119|120|140)\b
    -> scontrol show node {node}; tell the site, and exclude it: --set job.exclude={node}
gpu-memory-error :: node :: the memory of a GPU has an error that cannot be corrected
    uncorrectable|\bECC\b|cudaErrorECCUncorrectable
    -> tell the site, and exclude the node: --set job.exclude={node}
xid-of-the-program :: program :: a kernel of the program accessed memory that is not its own
    NVRM: Xid \S+ (?:13|31|43|45|68)\b
    -> set CUDA_LAUNCH_BLOCKING=1
gpu-memory :: configuration :: the model and its activations do not fit into the memory of the GPU
    CUDA out of memory|\.OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED|HIP out of memory|cudaErrorMemoryAllocation
    -> lower training.micro_batch, or use more tensor or pipeline parallelism
too-few-gpus :: configuration :: more ranks run on a node than GPUs are visible there
    invalid device ordinal|Duplicate GPU detected
    -> compare job.gpus_per_node and job.ntasks_per_node
gpu-code-missing :: configuration again :: the program was built for another kind of GPU
    no kernel image is available|PTX was compiled with an unsupported
    -> build it for the GPUs of this partition
gpu-driver :: configuration :: the driver of the node is older than the CUDA of the program
    driver on your system is too old|CUDA driver version is insufficient
    -> nvidia-smi; python -c 'import torch'
device-assert :: program :: a kernel met an index out of range, often a token above the vocabulary
    device-side assert triggered|block: \[.*Assertion `
    -> set CUDA_LAUNCH_BLOCKING=1
gpu-missing :: unknown :: the program sees no GPU
    no CUDA-capable device|CUDA driver initialization failed|No CUDA GPUs are av
    -> srun -w {node} nvidia-smi
illegal-access :: unknown :: a kernel accessed memory that is not its own: the program, or a sick GPU
    illegal memory access|misaligned address|unspecified launch
    -> set CUDA_LAUNCH_BLOCKING=1
shared-memory :: configuration :: /dev/shm is full
    out of shared memory|insufficient shared memory|/dev/shm.*No space
    -> df -h /dev/shm on the node; fewer data workers, or a larger --shm-size of the container
host-memory :: configuration :: the job used more memory of the node than it may
    oom[-_ ]kill|Out Of Memory|Out of memory: Killed process|OUT_OF_MEMORY|^\W*MemoryError
    |DefaultCPUAllocator: (?:can't|not enough)|Cannot allocate memory|numpy\S*MemoryError
    -> raise job.mem, or start fewer ranks and workers on a node
device-error :: node :: this node cannot reach a file system or a device
    Input/output error|Stale file handle|Transport endpoint is not connected
    |Cannot send after transport endpoint
    -> srun -w {node} df; tell the site if it stays
disk-full :: file system :: the file system is full
    No space left on device|Errno 28\b
    -> df -h and df -i of the folder; free some, then relayrun resume
write-failed :: file system :: a file could not be written to its end
    iostream error|PytorchStreamWriter failed|file write failed
    -> df -h and df -i of the folder; then relayrun resume
quota :: file system :: a quota is used up
    Disk quota exceeded|Errno 122\b
    -> lfs quota or quota -s; free some, then relayrun resume
read-only :: file system :: the file system does not take writes
    Read-only file system
    -> mount | grep the folder; ask the site, or set another run_dir
open-files :: configuration :: a process opened more files than it may
    Too many open files|Errno 24\b
    -> ulimit -n; lower the number of data workers or shards
processes :: configuration :: it may start no more threads
    can't start new thread|fork: (?:retry: )?Resource temp|pthread_create failed|Thread creation fail
    -> ulimit -u; fewer data workers, or a smaller OMP_NUM_THREADS
name-resolution :: network :: the name of a machine does not resolve to an address
    gai ?error: ?-(?!97)|gaierror|[Nn]ame or service not known|in name resolut|No address associated
    |[Cc]ould not resolve host|Name does not resolve|Could not resolve hostname
    -> getent hosts NAME on the node that says so
port :: network :: another program holds the port
    EADDRINUSE|[Aa]ddress already in use|\bport \S+ is already in use|another process is utilizing it
    -> nothing: the next job takes another port
hub :: network :: a server outside is not reached from the node
    couldn't connect to ['\"]https://huggingface|LocalEntryNotFoundError|OfflineModeIsEnab
    |Max retries exceeded with url|Failed to establish a new connection|ConnectTimeout
    -> download before the job, and set HF_HUB_OFFLINE=1
route :: network :: no way leads to another machine
    No route to host|Network is unreachable
    -> ip route and the firewall of the node; NCCL_SOCKET_IFNAME
access :: configuration again :: a server refuses this user
    \b40[13] Client Error|GatedRepoError|RepositoryNotFoundError|api_key not conf|No API key configured
    |CERTIFICATE_VERIFY_FAILED
    -> log in, or set the token
network-interface :: configuration :: the named network interface is not there
    no socket interface found|NCCL_SOCKET_IFNAME.*not found|Unable to find address for:
    |Unable to find interface
    -> ip -br addr on the node; set NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME
infiniband :: network :: a link of the fast network failed
    NET/IBP? ?: ?Got completion|Call to ibv_\w+ failed|IBV_WC_RETRY_EXC_ERR
    -> ibstat on the node; tell the site if it stays
gpu-error :: node :: a GPU reports an error
    CUDA error|HIP error|CUDA_ERROR_|\bXid\b|cudaError(?!\w*Invalid)|NCCL Hang.*device
    -> srun -w {node} nvidia-smi -q; run gpu-check there
script-missing :: configuration again :: the script or program is not there
    can't open file .*\[Errno 20?\]|can't find '__main__'|(?:^|[\s/])(?:ba|da|z|k)?sh: (?:\d+: cannot open .+:[ ]
    |(?!line )[^:]+: )No such file|execve\(\): .*: No such file
    -> compare command.run with ls of the path
module-missing :: configuration again :: a package of Python is missing where the ranks run
    ModuleNotFoundError|No module named
    -> install it for cluster.python, or correct PYTHONPATH
library-missing :: configuration again :: a library or name that the program imports is missing
    cannot open shared object file|GLIBC\w*_[\d.]+' not found|undefined symbol: |ImportError:
    -> cluster.modules and LD_LIBRARY_PATH; ldd of the file
environment-module :: configuration again :: module load failed
    Lmod has detected the following error|Unable to locate a modulefile|unknown module\(s\)
    -> module avail; correct cluster.modules
container :: configuration again :: the container does not start
    pyxis: (?:failed|couldn't|container start failed)|enroot\S* .*ERROR|FATAL: .*(?:image|contain)
    -> start the image by hand on a node
program-missing :: configuration again :: a program is not found or cannot be executed
    command not found|execve\(\): |error: execve|: not found$|exec: .*: (?:cannot execute|not found)
    |Exec format error|line \d+: \S+: No such file or directory$|cannot execute|env: .*: No such file
    -> give its full path; cluster.modules
flags :: configuration again :: the program refuses its arguments
    \.py: error: |: error: (?:unrecognized arguments|argument -|ambiguous option
    |the following arguments are required)|[Nn]o such option: |unrecognized option|Could not override '
    -> correct the flag; relayrun check
syntax :: program again :: the script is not valid
    SyntaxError: |IndentationError: |TabError: |syntax error near|unexpected EOF while|unbound variable
    -> correct the named line
shards-missing :: configuration again :: the token shards are not at the given prefix
    One or both of the \.idx and \.bin files cannot be found
    -> ls PREFIX.idx PREFIX.bin; correct the data paths
checkpoint-other-shape :: configuration again :: the checkpoint belongs to another model
    Error\(s\) in loading state_dict|size mismatch for |Unexpected key\(s\) in state_dict
    |Missing key\(s\) in state_dict|Missing key in checkpoint
    -> compare the model's settings with those of the checkpoint
checkpoint-damaged :: file system :: a file of the checkpoint is damaged
    PytorchStreamReader failed|unexpected EOF, expected|invalid load key|Invalid magic number|SafetensorError
    |UnpicklingError|CheckpointingException
    -> relayrun checkpoint verify; go on from an older one
permission :: configuration again :: this user may not use a file or a program
    Permission denied|PermissionError|Operation not permitted
    -> ls -ld of the path and its folders
file-missing :: configuration :: a file that the program needs is not there
    No such file or directory|FileNotFoundError|does not exist
    -> ls of the path on the node
not-a-number :: program :: loss or gradients are not numbers
    [Uu]nexpected result nan|[Ff]ound NaN in|nan in local (?:grad|forward)|(?:NaN|Inf) or (?:Inf|NaN) found
    |loss is (?:nan|inf)|returned nan values
    -> go back before it (relayrun resume with an older checkpoint); lower the learning rate
shapes :: program :: tensors of the program have shapes that do not fit
    shapes cannot be multiplied|must match the size of tensor|[Ss]ize mismatch|shape '.*' is invalid for input
    -> read the named line
time-limit :: Slurm :: the job was over its time limit
    DUE TO TIME LIMIT
    -> raise job.time
preempted :: Slurm :: Slurm gave the nodes to another job
    DUE TO PREEMPTION
    -> nothing
node-failure :: node :: Slurm lost a node
    [Nn]ode failure on|DUE TO NODE FAILURE|DUE to SIGNAL.*NODE_FAIL|Task launch for \S+ failed on node
    -> nothing: the chain goes on without it; sinfo -R
controller :: Slurm :: Slurm does not answer
    Unable to contact slurm|Socket timed out on send/recv|configuration source
    -> scontrol ping
step-refused :: configuration again :: Slurm refuses the step
    Unable to create step|More processors requested|Requested node config|srun: error: .*[Ii]nvalid
    |srun: (?:unrecognized|fatal)
    -> cluster.srun_options
abort :: program :: the program aborted
    terminate called|: Assertion `|Fatal Python error|Aborted\b|^ *what\(\): |MPI_ABORT
    -> read the lines before it
killed :: unknown :: something killed the process: often the memory of the node ran out
    \bKilled\b|killed by SIGKILL
    -> sacct -j {job} -o JobID,State,MaxRSS; dmesg of the node
crashed :: unknown :: the process crashed: a defect of a library, or of the node
    Segmentation fault|Bus error|Illegal instruction|Floating point exception
    -> run it again, on another node
assertion :: program again :: the program refuses what it is given
    \bAssertionError
    -> read the named line
exception :: program :: the program raised an exception
    ^(?:\w+\.)*(?:[A-Z]\w*(?:Error|Exception|Failed|Exit|Warning)|[A-Z]\w+)(?::|$)
    -> read the named line
"""
"""Entries: name, whose cause it is, whether it comes again, its meaning; then its pattern, and what to do next."""

_SECONDARY = re.compile(
    r"connection (?:was )?(?:closed|reset|refused|aborted)|broken pipe|remote process exited|ncclRemoteError|watchdog"
    r"|collective operation timeout|timeout caused pair closure|Dist(?:Network|Store)Error|socket timeout"
    r"|wait timeout|terminated|SIGTERM|^KeyboardInterrupt|^SystemExit|ChildFailedError|CalledProcessError"
    r"|timed out after \d+ ?\w* waiting|RendezvousTimeout|closing signal|Primary job +terminated|non-zero status",
    re.I,
)
"""Words that only report that another rank or program is gone, or that it was told to end."""


def _entry(text: str) -> FailureSignature:
    head, *pattern = text.split("\n    ")
    name, cause, meaning = head.split(" :: ")
    whose: Any = cause.removesuffix(" again")
    return FailureSignature(
        name=name,
        pattern="".join(pattern[:-1]),
        cause=whose,
        again=cause != whose,
        meaning=meaning,
        advice=pattern[-1].removeprefix("-> "),
    )


@functools.lru_cache(maxsize=16)
def signatures(more: tuple[FailureSignature, ...] = ()) -> tuple[tuple[re.Pattern[str], FailureSignature], ...]:
    """Return all entries with their compiled patterns, `more` of a site or a run first."""
    own = map(_entry, re.split(r"\n(?=\S)", _TABLE.strip("\n")))
    return tuple((re.compile(each.pattern), each) for each in (*more, *own))


def classify(words: str, more: Sequence[FailureSignature] = ()) -> FailureSignature | None:
    """Return the entry of a line of words; None if no entry matches."""
    return next((each for pattern, each in signatures(tuple(more)) if pattern.search(words)), None)


def entry(name: str, more: Sequence[FailureSignature] = ()) -> FailureSignature:
    """Return the entry of this name; the most general one if there is none."""
    known = [each for _, each in signatures(tuple(more))]
    return next((each for each in known if each.name == name), known[-1])


def cause_advice(name: str, more: Sequence[FailureSignature] = ()) -> str:
    """Return what to do next for an entry; empty without one."""
    return known.advice if (known := entry(name, more)).name == name else ""


def cause_words(name: str, more: Sequence[FailureSignature] = ()) -> str:
    """Return the meaning of an entry, whose cause it is and what to do next, in one line; empty without an entry."""
    known = entry(name, more)
    words = f"{known.meaning} ({known.name}; whose: {known.cause}); next: {known.advice}"
    return words if known.name == name else ""


def is_secondary_error(words: str, more: Sequence[FailureSignature] = ()) -> bool:
    """True if words only report that another rank is gone, or that it was told to end."""
    if _SECONDARY.search(words) is None:
        return False
    found = classify(words, more)
    return found is None or found.name in GENERAL


WARNINGS = (
    *("gpu-lost", "gpu-memory-error", "xid-of-the-program", "too-few-gpus", "shared-memory", "host-memory", "quota"),
    *("illegal-access", "device-assert", "gpu-memory", "route"),
    *("disk-full", "name-resolution", "port", "network-interface", "infiniband", "environment-module", "container"),
    *("node-failure", "time-limit", "preempted", "step-refused"),
)
"""Entries that count in any line, if no program says with its last words why it ended."""
ENDS = ("abort", "crashed", "killed")
"""Entries that say how a program ended: another line may say why."""
GENERAL = ("exception", "assertion", *ENDS)
"""Entries without a special cause."""
