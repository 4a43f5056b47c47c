"""Launchers as teams write them, and what Bash starts with them: `started` runs one with stand-ins for Slurm."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ENVIRONMENT = {
    "USER": "ada",
    "HOME": "/home/ada",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "8",
    "SLURM_NPROCS": "8",
    "SLURM_CPUS_PER_TASK": "72",
    "SLURM_GPUS_PER_NODE": "4",
    "SLURM_NTASKS_PER_NODE": "4",
}
"""Variables that a launcher finds."""

HEAD = "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=4\n#SBATCH -t 1:00:00\n"

TAKEN = {
    "one line": r"""
srun python3 /m/pretrain_gpt.py --num-layers 2 --bf16
""",
    "continued lines": r"""
srun --label \
  python3 -u /m/pretrain_gpt.py \
  --num-layers 2 \
  --lr 1e-4 --min-lr=1e-5
""",
    "an array": r"""
ARGS=(
  --num-layers 2 # two
  --bf16
)
srun python3 /m/pretrain_gpt.py "${ARGS[@]}"
""",
    "appended arrays": r"""
ARGS=(--num-layers 2)
if [ -n "$USER" ]; then ARGS+=(--bf16); fi
ARGS+=( --lr 1e-4 )
srun python3 /m/pretrain_gpt.py ${ARGS[@]}
""",
    "texts": r"""
MODEL_ARGS="
  --num-layers 2
  --hidden-size 64 "
TRAIN="--bf16 $MODEL_ARGS"
srun python3 /m/pretrain_gpt.py $TRAIN
""",
    "defaults": r"""
MBS=${MBS:-2}
GBS=${GBS:-$((MBS * SLURM_NPROCS * 4))}
: ${SEQ:=4096}
LR=${LR-3e-4}
srun python3 /m/pretrain_gpt.py --micro-batch-size $MBS --global-batch-size $GBS --seq-length $SEQ --lr $LR
""",
    "case": r"""
MODEL=${MODEL:-7b}
case $MODEL in
  1b|1B) L=16; H=2048 ;;
  7?) L=32; H=4096 ;;
  *) echo no; exit 1 ;;
esac
srun python3 /m/pretrain_gpt.py --num-layers $L --hidden-size $H
""",
    "if and elif": r"""
SIZE=70
if [[ $SIZE -lt 10 ]]; then TP=1; elif [ "$SIZE" -ge 70 ] && [ $SLURM_NNODES != 1 ]; then TP=4
else TP=2; fi
srun python3 /m/pretrain_gpt.py --tensor-model-parallel-size $TP
""",
    "for over words": r"""
for f in a b c; do PREFIXES="$PREFIXES 1.0 /data/$f"; done
srun python3 /m/pretrain_gpt.py --data-path $PREFIXES
""",
    "for over numbers": r"""
P=()
for i in {0..2}; do P+=(/data/shard_0$i); done
for ((i = 5; i < 7; i++)); do P+=(/data/shard_0${i}); done
srun python3 /m/pretrain_gpt.py --data-path "${P[@]}"
""",
    "while": r"""
i=0
while [ $i -lt 3 ]; do A="$A --data-path /d/$i"; i=$((i + 1)); done
srun python3 /m/pretrain_gpt.py $A
""",
    "functions": r"""
model_args() {
  local layers=$1 hidden=${2:-64}
  MODEL_ARGS=(--num-layers $layers --hidden-size $hidden)
}
function launch { srun python3 /m/pretrain_gpt.py "$@"; }
model_args 4
launch "${MODEL_ARGS[@]}" --bf16
""",
    "a function that prints": r"""
args() { echo "--num-layers 2 --lr 1e-4"; }
srun python3 /m/pretrain_gpt.py $(args) --bf16
""",
    "traps": r"""
set -euo pipefail
cleanup() { echo gone; }
trap cleanup EXIT
trap 'kill -USR1 $PID' USR1
srun python3 /m/pretrain_gpt.py --num-layers 2 &
PID=$!
wait $PID
""",
    "a here-document": r"""
ARGS=$(cat <<EOF
--num-layers 2
--hidden-size $((32 * 2))
EOF
)
srun python3 /m/pretrain_gpt.py $ARGS
""",
    "a command in a text": r"""
ARGS="--num-layers 2"
CMD="python3 /m/pretrain_gpt.py $ARGS --lr 1e-4"
srun bash -c "RANK=\$SLURM_PROCID LOCAL_RANK=\$SLURM_LOCALID $CMD"
""",
    "eval": r"""
CMD="srun python3 /m/pretrain_gpt.py --num-layers 2"
eval "$CMD --bf16"
""",
    "exported and run by a shell": r"""
export LAYERS=4
HIDDEN=64
srun bash -c 'python3 /m/pretrain_gpt.py --num-layers $LAYERS'
""",
    "a prefix in a variable": r"""
LAUNCHER="srun --cpus-per-task=$SLURM_CPUS_PER_TASK --mpi=pmi2"
PY="python3 -u"
$LAUNCHER $PY /m/pretrain_gpt.py --num-layers 2
""",
    "environment before the program": r"""
export CUDA_DEVICE_MAX_CONNECTIONS=1
NCCL_DEBUG=INFO srun env OMP_NUM_THREADS=4 python3 /m/pretrain_gpt.py --bf16
""",
    "torchrun": r"""
GPUS=8
DIST=(--nproc_per_node $GPUS --nnodes $SLURM_NNODES --rdzv_backend c10d)
srun torchrun "${DIST[@]}" /m/pretrain_gpt.py --num-layers 2
""",
    "changed texts": r"""
NAME=llama3-8b.yaml
BASE=${NAME%.yaml}
SIZE=${BASE##*-}
UP=${SIZE^^}
DOTS=${NAME//-/_}
PART=${NAME:0:5}
srun python3 /m/pretrain_gpt.py --a $BASE --b $SIZE --c $UP --d $DOTS --e $PART --f ${#NAME} --g ${NAME/l/L}
""",
    "an associative array": r"""
declare -A LAYERS=([1b]=16 [8b]=32)
SIZE=8b
N=${LAYERS[$SIZE]}
srun python3 /m/pretrain_gpt.py --num-layers $N --sizes ${#LAYERS[@]}
""",
    "indirect": r"""
LAYERS_8B=32
V=LAYERS_8B
srun python3 /m/pretrain_gpt.py --num-layers ${!V}
""",
    "switches": r"""
FP8=true
RECOMPUTE=0
EXTRA=""
[[ $FP8 == true ]] && EXTRA="$EXTRA --fp8-format hybrid"
(( RECOMPUTE )) && EXTRA="$EXTRA --recompute-granularity full"
[ -z "$MOCK" ] || EXTRA="$EXTRA --mock-data"
srun python3 /m/pretrain_gpt.py --bf16 $EXTRA
""",
    "lists by IFS": r"""
DATASETS=(/d/a /d/b)
LIST=$(IFS=','; echo "${DATASETS[*]}")
IFS=, read -ra BACK <<< "$LIST"
srun python3 /m/pretrain_gpt.py --n ${#BACK[@]} --data-path "${BACK[@]}" --list $LIST
""",
    "set -a": r"""
set -a
LAYERS=2
set +a
HIDDEN=5
srun bash -c 'python3 /m/pretrain_gpt.py --num-layers ${LAYERS} --x ${HIDDEN:-none}'
""",
    "printf": r"""
printf -v NAME '%s-%03d' run 7
LR=$(printf '%.1e' 0.0003)
srun python3 /m/pretrain_gpt.py --name $NAME --lr $LR
""",
    "quotes": r"""
A='one two'
srun python3 /m/pretrain_gpt.py --a "$A" --b $A --c '$A' --d "\$A" --e $'t\'x' --f "a"'b'c
""",
    "a file that is written": r"""
cat > team.sh <<'EOF'
python3 /m/pretrain_gpt.py --num-layers $1 $2
EOF
srun bash team.sh 3 --bf16
""",
    "directories": r"""
ROOT=/nowhere/$USER
if [ -d $ROOT/ckpt ]; then LOAD="--load $ROOT/ckpt"; else LOAD="--finetune"; fi
mkdir -p $ROOT 2>/dev/null || true
cd /
srun python3 /m/pretrain_gpt.py --save $ROOT/ckpt $LOAD
""",
    "grown over functions": r"""
add() { FLAGS+=("--$1" "${@:2}"); }
FLAGS=()
add num-layers 2
add bf16
add data-path /a /b
srun python3 /m/pretrain_gpt.py "${FLAGS[@]}"
""",
    "shift": r"""
set -- --num-layers 2 --bf16
while [ $# -gt 0 ]; do
  case "$1" in --num-layers) L=$2; shift 2 ;; *) R="$R $1"; shift ;; esac
done
srun python3 /m/pretrain_gpt.py --num-layers $L $R
""",
    "expressions of Megatron-LM": r"""
FREQ="([0]*3+[1]*58)"
PATTERN=M-M-M--M-*M-M
MOE="--moe-layer-freq $FREQ --hybrid-layer-pattern $PATTERN"
srun python3 /m/pretrain_gpt.py $MOE --moe-layer-freq [0]*3+[1]*58
""",
    "a command in exported variables": r"""
export LAUNCHER="python3 -u -m torch.distributed.run --nproc_per_node 4 --nnodes $SLURM_NNODES"
export CMD=" /m/pretrain_gpt.py --num-layers 2 --bf16 "
srun bash -c '$LAUNCHER --node_rank $SLURM_PROCID $CMD'
""",
    "arithmetic": r"""
DP=$((SLURM_NPROCS / (2 * 2)))
let GBS=DP*16
STEPS=$(( 10**3 % 7 ? 500 : 600 ))
((STEPS += 5))
X=$((0x10 + 010))
srun python3 /m/pretrain_gpt.py --global-batch-size $GBS --train-iters $STEPS --x $X --half $((7 / 2)) --neg $((-7 / 2))
""",
}
"""Launchers whose command is known without running them."""

NAMED = {
    "a program's output": (
        r"""
L=$(python3 layers.py)
srun python3 /m/pretrain_gpt.py --num-layers $L
""",
        5,
        "nobody runs",
    ),
    "the job's number": (
        r"""
srun python3 /m/pretrain_gpt.py --seed $SLURM_JOB_ID
""",
        5,
        "has a value in a job alone",
    ),
    "flags that nobody gives": (
        r"""
srun python3 /m/pretrain_gpt.py ${MODEL_FLAGS} --bf16
""",
        5,
        "$MODEL_FLAGS has no value",
    ),
    "an unset variable": (
        r"""
srun python3 /m/pretrain_gpt.py --num-layers $LAYERS
""",
        5,
        "$LAYERS has no value",
    ),
    "a condition of the job": (
        r"""
L=2
if nvidia-smi | grep -q H100; then
  L=4
fi
srun python3 /m/pretrain_gpt.py --num-layers $L
""",
        6,
        "it depends on the condition of line 6",
    ),
    "a file that is read": (
        r"""
read L < layers.txt
srun python3 /m/pretrain_gpt.py --num-layers $L
""",
        5,
        "$L is read",
    ),
    "a file that is sourced": (
        r"""
. ./sizes.sh
srun python3 /m/pretrain_gpt.py --num-layers 2
""",
        5,
        "no such file here",
    ),
    "a loop of the job": (
        r"""
N=0
while ping -c1 $HOST; do N=$((N + 1)); done
srun python3 /m/pretrain_gpt.py --num-layers $N
""",
        6,
        "the loop of line 6",
    ),
    "two trainings": (
        r"""
srun python3 /m/pretrain_gpt.py --num-layers 2
srun python3 /m/pretrain_gpt.py --num-layers 4
""",
        None,
        "training starts 2 times, in lines 5, 6",
    ),
    "no training": (
        r"""
srun python3 /m/train.py --num-layers 2
""",
        None,
        "starts no training",
    ),
    "relative files": (
        r"""
srun python3 /m/pretrain_gpt.py --data-path data/*.bin
""",
        5,
        "in which folder",
    ),
    "a name reference": (
        r"""
declare -n X=Y
X=2
srun python3 /m/pretrain_gpt.py --num-layers $Y
""",
        5,
        "is not read",
    ),
    "a process substitution": (
        r"""
mapfile -t D < <(ls /data)
srun python3 /m/pretrain_gpt.py --data-path ${D[@]}
""",
        5,
        "only a job has",
    ),
}
"""Launchers with a value that only a job knows: text, line and words of the error."""

_STAND_IN = """#!/bin/bash
case "${0##*/}" in
srun)
    while [[ "$1" == -* ]]; do shift; done
    export SLURM_PROCID=0 SLURM_LOCALID=0
    exec "$@" ;;
python3 | torchrun)
    for word; do [[ "$word" == *pretrain_*.py ]] && printf '%s\\0' "$@" >"$STARTED"; done
    exit 0 ;;
esac
exit 1
"""


def started(launcher: Path, folder: Path) -> list[str]:
    """The words behind the program that Bash starts with a launcher."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    for name in ("srun", "python3", "torchrun", "scontrol", "nvidia-smi"):
        (tools / name).write_text(_STAND_IN)
        (tools / name).chmod(0o755)
    out = folder / "started"
    out.unlink(missing_ok=True)
    environment = ENVIRONMENT | {"PATH": f"{tools}:{os.environ['PATH']}", "STARTED": str(out)}
    done = subprocess.run(
        ["bash", launcher], env=environment, cwd=folder, capture_output=True, check=False, timeout=600, text=True
    )
    assert out.is_file(), done.stderr
    words = out.read_text().split("\0")[:-1]
    return words[1 + next(number for number, word in enumerate(words) if "pretrain_" in word) :]
