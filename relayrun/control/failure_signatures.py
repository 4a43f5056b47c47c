"""The table of failure signatures: what a line of a log means, and whose cause it is.

All trainers, strikes, `relayrun why`, STOP and notices use this one table. A line belongs to the first entry whose
pattern it matches: special entries stand before general ones. A site adds entries by `cluster.failure_signatures`, a
run by `chain.failure_signatures`; they stand before these in the plan. Standard library only.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from relayrun.config.sections.chain import FailureOwner, FailureSignature

_Entry = tuple[str, FailureOwner, bool, str, str, str]
_TABLE: tuple[_Entry, ...] = (
    # name, whose cause, comes again, pattern, meaning, what to do
    ("gpu-lost", "node", False, r"fallen off the bus|GPU is lost|Unable to determine the device handle for GPU"
     r"|NVRM: Xid \S+ (?:48|62|63|64|74|79|92|94|95|119|120|140)\b", "a GPU of this node has failed",
     "scontrol show node {node}; tell the site, and exclude it: --set job.exclude={node}"),
    ("gpu-memory-error", "node", False, r"uncorrectable|\bECC\b|cudaErrorECCUncorrectable",
     "the memory of a GPU has an error that cannot be corrected",
     "tell the site, and exclude the node: --set job.exclude={node}"),
    ("xid-of-the-program", "program", False, r"NVRM: Xid \S+ (?:13|31|43|45|68)\b",
     "a kernel of the program accessed memory that is not its own", "set CUDA_LAUNCH_BLOCKING=1"),
    ("gpu-memory", "configuration", False,
     r"CUDA out of memory|\.OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED|HIP out of memory|cudaErrorMemoryAllocation",
     "the model and its activations do not fit into the memory of the GPU",
     "lower training.micro_batch, or use more tensor or pipeline parallelism"),
    ("too-few-gpus", "configuration", False, r"invalid device ordinal|Duplicate GPU detected",
     "more ranks run on a node than GPUs are visible there", "compare job.gpus_per_node and job.ntasks_per_node"),
    ("gpu-code-missing", "configuration", True, r"no kernel image is available|PTX was compiled with an unsupported",
     "the program was built for another kind of GPU", "build it for the GPUs of this partition"),
    ("gpu-driver", "configuration", False, r"driver on your system is too old|CUDA driver version is insufficient",
     "the driver of the node is older than the CUDA of the program", "nvidia-smi; python -c 'import torch'"),
    ("device-assert", "program", False, r"device-side assert triggered|block: \[.*Assertion `",
     "a kernel met an index out of range, often a token above the vocabulary", "set CUDA_LAUNCH_BLOCKING=1"),
    ("gpu-missing", "unknown", False, r"no CUDA-capable device|CUDA driver initialization failed|No CUDA GPUs are av",
     "the program sees no GPU", "srun -w {node} nvidia-smi"),
    ("illegal-access", "unknown", False, r"illegal memory access|misaligned address|unspecified launch",
     "a kernel accessed memory that is not its own: the program, or a sick GPU", "set CUDA_LAUNCH_BLOCKING=1"),
    ("shared-memory", "configuration", False, r"out of shared memory|insufficient shared memory|/dev/shm.*No space",
     "/dev/shm is full", "df -h /dev/shm on the node; fewer data workers, or a larger --shm-size of the container"),
    ("host-memory", "configuration", False, r"oom[-_ ]kill|Out Of Memory|Out of memory: Killed process|OUT_OF_MEMORY"
     r"|^\W*MemoryError|DefaultCPUAllocator: (?:can't|not enough)|Cannot allocate memory|numpy\S*MemoryError",
     "the job used more memory of the node than it may", "raise job.mem, or start fewer ranks and workers on a node"),
    ("device-error", "node", False, r"Input/output error|Stale file handle|Transport endpoint is not connected"
     r"|Cannot send after transport endpoint", "this node cannot reach a file system or a device",
     "srun -w {node} df; tell the site if it stays"),
    ("disk-full", "file system", False, r"No space left on device|Errno 28\b", "the file system is full",
     "df -h and df -i of the folder; free some, then relayrun resume"),
    ("write-failed", "file system", False, r"iostream error|PytorchStreamWriter failed|file write failed",
     "a file could not be written to its end", "df -h and df -i of the folder; then relayrun resume"),
    ("quota", "file system", False, r"Disk quota exceeded|Errno 122\b", "a quota is used up",
     "lfs quota or quota -s; free some, then relayrun resume"),
    ("read-only", "file system", False, r"Read-only file system", "the file system does not take writes",
     "mount | grep the folder; ask the site, or set another run_dir"),
    ("open-files", "configuration", False, r"Too many open files|Errno 24\b", "a process opened more files than it may",
     "ulimit -n; lower the number of data workers or shards"),
    ("processes", "configuration", False, r"can't start new thread|fork: (?:retry: )?Resource temp"
     r"|pthread_create failed|Thread creation fail", "it may start no more threads",
     "ulimit -u; fewer data workers, or a smaller OMP_NUM_THREADS"),
    ("name-resolution", "network", False, r"gai ?error: ?-(?!97)|gaierror|[Nn]ame or service not known|in name resolut"
     r"|No address associated|[Cc]ould not resolve host|Name does not resolve|Could not resolve hostname",
     "the name of a machine does not resolve to an address", "getent hosts NAME on the node that says so"),
    ("port", "network", False, r"EADDRINUSE|[Aa]ddress already in use|\bport \S+ is already in use"
     r"|another process is utilizing it", "another program holds the port", "nothing: the next job takes another port"),
    ("hub", "network", False, r"couldn't connect to ['\"]https://huggingface|LocalEntryNotFoundError|OfflineModeIsEnab"
     r"|Max retries exceeded with url|Failed to establish a new connection|ConnectTimeout",
     "a server outside is not reached from the node", "download before the job, and set HF_HUB_OFFLINE=1"),
    ("route", "network", False, r"No route to host|Network is unreachable", "no way leads to another machine",
     "ip route and the firewall of the node; NCCL_SOCKET_IFNAME"),
    ("access", "configuration", True, r"\b40[13] Client Error|GatedRepoError|RepositoryNotFoundError|api_key not conf"
     r"|No API key configured|CERTIFICATE_VERIFY_FAILED", "a server refuses this user", "log in, or set the token"),
    ("network-interface", "configuration", False, r"no socket interface found|NCCL_SOCKET_IFNAME.*not found"
     r"|Unable to find address for: |Unable to find interface", "the named network interface is not there",
     "ip -br addr on the node; set NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME"),
    ("infiniband", "network", False, r"NET/IBP? ?: ?Got completion|Call to ibv_\w+ failed|IBV_WC_RETRY_EXC_ERR",
     "a link of the fast network failed", "ibstat on the node; tell the site if it stays"),
    ("gpu-error", "node", False, r"CUDA error|HIP error|CUDA_ERROR_|\bXid\b|cudaError(?!\w*Invalid)|NCCL Hang.*device",
     "a GPU reports an error", "srun -w {node} nvidia-smi -q; run gpu-check there"),
    ("script-missing", "configuration", True, r"can't open file .*\[Errno 20?\]|can't find '__main__'"
     r"|(?:^|[\s/])(?:ba|da|z|k)?sh: (?:\d+: cannot open .+: |(?!line )[^:]+: )No such file"
     r"|execve\(\): .*: No such file", "the script or program is not there", "compare command.run with ls of the path"),
    ("module-missing", "configuration", True, r"ModuleNotFoundError|No module named",
     "a package of Python is missing where the ranks run", "install it for cluster.python, or correct PYTHONPATH"),
    ("library-missing", "configuration", True, r"cannot open shared object file|GLIBC\w*_[\d.]+' not found"
     r"|undefined symbol: |ImportError: ", "a library or name that the program imports is missing",
     "cluster.modules and LD_LIBRARY_PATH; ldd of the file"),
    ("environment-module", "configuration", True, r"Lmod has detected the following error|Unable to locate a modulefile"
     r"|unknown module\(s\)", "module load failed", "module avail; correct cluster.modules"),
    ("container", "configuration", True, r"pyxis: (?:failed|couldn't|container start failed)|enroot\S* .*ERROR"
     r"|FATAL: .*(?:image|contain)", "the container does not start", "start the image by hand on a node"),
    ("program-missing", "configuration", True, r"command not found|execve\(\): |error: execve|: not found$"
     r"|exec: .*: (?:cannot execute|not found)|Exec format error|line \d+: \S+: No such file or directory$"
     r"|cannot execute|env: .*: No such file",
     "a program is not found or cannot be executed", "give its full path; cluster.modules"),
    ("flags", "configuration", True, r"\.py: error: |: error: (?:unrecognized arguments|argument -|ambiguous option|"
     r"the following arguments are required)|[Nn]o such option: |unrecognized option|Could not override '",
     "the program refuses its arguments", "correct the flag; relayrun check"),
    ("syntax", "program", True, r"SyntaxError: |IndentationError: |TabError: |syntax error near|unexpected EOF while"
     r"|unbound variable", "the script is not valid", "correct the named line"),
    ("shards-missing", "configuration", True, r"One or both of the \.idx and \.bin files cannot be found",
     "the token shards are not at the given prefix", "ls PREFIX.idx PREFIX.bin; correct the data paths"),
    ("checkpoint-other-shape", "configuration", True, r"Error\(s\) in loading state_dict|size mismatch for |Unexpected "
     r"key\(s\) in state_dict|Missing key\(s\) in state_dict|Missing key in checkpoint",
     "the checkpoint belongs to another model", "compare the model's settings with those of the checkpoint"),
    ("checkpoint-damaged", "file system", False, r"PytorchStreamReader failed|unexpected EOF, expected|invalid load key"
     r"|Invalid magic number|SafetensorError|UnpicklingError|CheckpointingException",
     "a file of the checkpoint is damaged", "relayrun checkpoint verify; go on from an older one"),
    ("permission", "configuration", True, r"Permission denied|PermissionError|Operation not permitted",
     "this user may not use a file or a program", "ls -ld of the path and its folders"),
    ("file-missing", "configuration", False, r"No such file or directory|FileNotFoundError|does not exist",
     "a file that the program needs is not there", "ls of the path on the node"),
    ("not-a-number", "program", False, r"[Uu]nexpected result nan|[Ff]ound NaN in|nan in local (?:grad|forward)"
     r"|(?:NaN|Inf) or (?:Inf|NaN) found|loss is (?:nan|inf)|returned nan values", "loss or gradients are not numbers",
     "go back before it (relayrun resume with an older checkpoint); lower the learning rate"),
    ("shapes", "program", False, r"shapes cannot be multiplied|must match the size of tensor|[Ss]ize mismatch|shape "
     r"'.*' is invalid for input", "tensors of the program have shapes that do not fit", "read the named line"),
    ("time-limit", "Slurm", False, r"DUE TO TIME LIMIT", "the job was over its time limit", "raise job.time"),
    ("preempted", "Slurm", False, r"DUE TO PREEMPTION", "Slurm gave the nodes to another job", "nothing"),
    ("node-failure", "node", False, r"[Nn]ode failure on|DUE TO NODE FAILURE|DUE to SIGNAL.*NODE_FAIL|Task launch for "
     r"\S+ failed on node", "Slurm lost a node", "nothing: the chain goes on without it; sinfo -R"),
    ("controller", "Slurm", False, r"Unable to contact slurm|Socket timed out on send/recv|configuration source",
     "Slurm does not answer", "scontrol ping"),
    ("step-refused", "configuration", True, r"Unable to create step|More processors requested|Requested node config"
     r"|srun: error: .*[Ii]nvalid|srun: (?:unrecognized|fatal)", "Slurm refuses the step", "cluster.srun_options"),
    ("abort", "program", False, r"terminate called|: Assertion `|Fatal Python error|Aborted\b|^ *what\(\): |MPI_ABORT",
     "the program aborted", "read the lines before it"),
    ("killed", "unknown", False, r"\bKilled\b|killed by SIGKILL", "something killed the process: often the memory of "
     "the node ran out", "sacct -j {job} -o JobID,State,MaxRSS; dmesg of the node"),
    ("crashed", "unknown", False, r"Segmentation fault|Bus error|Illegal instruction|Floating point exception",
     "the process crashed: a defect of a library, or of the node", "run it again, on another node"),
    ("assertion", "program", True, r"\bAssertionError", "the program refuses what it is given", "read the named line"),
    ("exception", "program", False, r"^(?:\w+\.)*(?:[A-Z]\w*(?:Error|Exception|Failed|Exit|Warning)|[A-Z]\w+)(?::|$)",
     "the program raised an exception", "read the named line"),
)  # fmt: skip

_SECONDARY = re.compile(
    r"connection (?:was )?(?:closed|reset|refused|aborted)|broken pipe|remote process exited|ncclRemoteError|watchdog"
    r"|collective operation timeout|timeout caused pair closure|Dist(?:Network|Store)Error|socket timeout"
    r"|wait timeout|terminated|SIGTERM|^KeyboardInterrupt|^SystemExit|ChildFailedError|CalledProcessError"
    r"|timed out after \d+ ?\w* waiting|RendezvousTimeout|closing signal|Primary job +terminated|non-zero status",
    re.I,
)
"""Words that only report that another rank or program is gone, or that it was told to end."""


@functools.lru_cache(maxsize=16)
def signatures(more: tuple[FailureSignature, ...] = ()) -> tuple[tuple[re.Pattern[str], FailureSignature], ...]:
    """Return all entries with their compiled patterns, `more` of a site or a run first."""
    own = (
        FailureSignature(name=name, pattern=pattern, cause=cause, again=again, meaning=meaning, advice=advice)
        for name, cause, again, pattern, meaning, advice in _TABLE
    )
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
