"""Constructs of Bash in which a reader of launchers errs easily: what Bash starts is what is read, or it is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayrun.errors import ConfigError
from relayrun.submit.adopt import adopt
from relayrun.submit.megatron_lm.launcher_file import read_launcher
from tests.megatron_lm.team_launchers import ENVIRONMENT, HEAD, started

TRAINING = "srun python3 /m/pretrain_gpt.py --x $X\n"
"""What a construct without a training of its own ends with."""

TAKEN = {
    "declare word": r"""
for p in A=1 B=2; do declare "$p"; done; X=$A$B
""",
    "rematch": r"""
[[ tp4pp2 =~ ^tp([0-9]+)pp([0-9]+)$ ]] && X=${BASH_REMATCH[1]:-9}
""",
    "rematch if": r"""
if [[ a-3 =~ -([0-9]) ]]; then X=${BASH_REMATCH[1]}; fi
""",
    "posix strip": r"""
A="ab  "; X=${A%"${A##*[![:space:]]}"}
""",
    "cd pwd": r"""
cd /usr
X=$PWD
""",
    "while read file": r"""
while read -r a b; do X=$X$a$b; done < list.txt
""",
    "while read heredoc": r"""
while read -r a; do X=$X$a; done <<E
q
w
E
""",
    "while read herestring": r"""
while read -r a b; do X=$X$a; done <<< 'q w'
""",
    "while read procsub": r"""
while read -r s; do X=$X$s; done < <(printf 'a\nb\n')
""",
    "while IFS= read": r"""
while IFS= read -r a; do [[ -z $a || $a == \#* ]] && continue; X=$X${a// /_}; done < list.txt
""",
    "read twice": r"""
{ read a; read b; } <<< $'q\nw'
X=$a$b
""",
    "read ifs colon empty": r"""
IFS=: read -r a b c <<< 'x::y'
X=$a/$b/$c
""",
    "read ifs comma a": r"""
IFS=, read -ra A <<< 'x,,y'
X=${#A[@]}
""",
    "read -d heredoc": r"""
read -r -d '' O <<E
--a 1
--b 2
E
srun python3 /m/pretrain_gpt.py ${O//$'\n'/ }
""",
    "read reply": r"""
read <<< 'q w'
X=${REPLY// /}
""",
    "mapfile file": r"""
mapfile -t H < list.txt
X=${#H[@]}${H[1]// /}
""",
    "mapfile no t": r"""
mapfile H <<< $'a\nb'
X=${H[0]}z
""",
    "mapfile procsub": r"""
mapfile -t H < <(printf '%s\n' a b c)
X=${H[1]}
""",
    "readarray": r"""
readarray -t H <<< $'a\nb'
X=${H[1]}
""",
    "cat file": r"""
X=$(cat sizes.sh)
""",
    "< file": r"""
X=$(< sizes.sh)
""",
    "export word": r"""
K=AB; V=3; export "$K"="$V"; X=$AB
""",
    "printf q": r"""
A=('a b' 'c')
Q=$(printf '%q ' "${A[@]}")
srun bash -c "python3 /m/pretrain_gpt.py --x $Q"
""",
    "printf b": r"""
X=$(printf '%b' 'a\tb')
""",
    "printf octal": r"""
X=$(printf '%d' 010)
""",
    "printf hex": r"""
X=$(printf '%d' 0x10)
""",
    "printf esc": r"""
X=$(printf 'a\x41b')
""",
    "printf e": r"""
X=$(printf '%.2e' 3e-4)
""",
    "echo -e": r"""
X=$(echo -e 'a\x41')
""",
    "echo &> null": r"""
X=$(echo a &>/dev/null; echo b)
""",
    "block to err": r"""
X=$({ echo a; echo c; } >&2; echo b)
""",
    "func to err": r"""
log() { echo "$*"; }
X=$(log a >&2; echo b)
""",
    "if to null": r"""
X=$(if true; then echo a; fi >/dev/null; echo b)
""",
    "here file append": r"""
echo A=1 > f.sh; echo B=2 >> f.sh; source ./f.sh; X=$A$B
""",
    "cat > file block": r"""
{ echo A=1; echo B=2; } > f.sh; source ./f.sh; X=$A$B
""",
    "cat >> file": r"""
cat > f.sh <<E
A=1
E
cat >> f.sh <<E
B=2
E
source ./f.sh; X=$A$B
""",
    "set -f": r"""
set -f; X=/us?
""",
    "tilde assign path": r"""
X=/a:~/b
""",
    "tilde default": r"""
X=${NOPE:-~/a}
""",
    "brace nested": r"""
X=$(echo {a,b{1,2}})
""",
    "brace letters": r"""
X=$(echo {a..e})
""",
    "brace path q": r"""
A=x; X=$(echo "$A"/{a,b})
""",
    "arith tern nested": r"""
A=5; X=$((A>3 ? A>4 ? 1 : 2 : 3))
""",
    "arith base": r"""
X=$((16#ff + 2#101))
""",
    "arith assign in": r"""
X=$(( (A=4) * 2 ))
""",
    "arith post in": r"""
A=1; X=$((A++ + 5)); X=$X$A
""",
    "arith array": r"""
A=(3 4); X=$((A[1]*2))
""",
    "arith overflow": r"""
X=$(( 9223372036854775807 + 1 ))
""",
    "arith pow": r"""
X=$(( 10**19 ))
""",
    "arith unary": r"""
X=$(( !0 + !5 ))$(( ~5 ))
""",
    "arith cmp chain": r"""
X=$(( 3 > 2 > 1 ))
""",
    "arith bit prec": r"""
X=$(( 5 & 3 == 3 ))
""",
    "arith and assign": r"""
A=0; (( A == 0 && (A = 7) )); X=$A
""",
    "arith side ternary": r"""
A=1; X=$(( 0 ? (A=9) : 3 ))$A
""",
    "expr": r"""
X=$(expr 3 + 4)
""",
    "ifs default": r"""
X="${IFS:-none}"; X=${#X}
""",
    "array exported": r"""
export A=(1 2); srun bash -c 'python3 /m/pretrain_gpt.py --x ${A:-none}'
""",
    "declare -i": r"""
declare -i N=3+4; N+=5; X=$N
""",
    "shift too many": r"""
set -- a b; shift 5; X=$1
""",
    "alt words": r"""
A=1; srun python3 /m/pretrain_gpt.py --bf16 ${A:+--x 1 --y} ${B:+--z}
""",
    "replace slash": r"""
A=a/b/c; X=${A//\//-}
""",
    "replace quoted slash": r"""
A='a/b'; X=${A//'/'/-}
""",
    "case mod pattern": r"""
A=hello; X=${A^^[el]}
""",
    "backtick": r"""
X=`echo a\`echo b\``
""",
    "[[ regex quoted": r"""
[[ a.c =~ 'a.c' && abc =~ a.c && ! abc =~ 'a.c' ]] && X=1 || X=2
""",
    "[[ regex var quoted": r"""
re='a.c'; [[ abc =~ "$re" ]] && X=1 || X=2
""",
    "[ -n unq unset": r"""
[ -n $NOPE ] && X=1 || X=2
""",
    "[ -eq 08": r"""
[ 08 -eq 8 ] && X=1 || X=2
""",
    "[ -eq bad": r"""
[ a -eq 8 ] 2>/dev/null && X=1 || X=2
""",
    "[ -eq empty": r"""
[ '' -eq 0 ] 2>/dev/null && X=1 || X=2
""",
    "[ -v arr": r"""
declare -A M=([a]=1); [[ -v M[a] ]] && X=1 || X=2
""",
    "source args": r"""
echo 'X=$1' > a.sh; source ./a.sh 5
""",
    "bash stdin pipe": r"""
echo 'srun python3 /m/pretrain_gpt.py --x 1' | bash
""",
    "bash -c args": r"""
srun bash -c 'python3 /m/pretrain_gpt.py --x $0 $1' a b
""",
    "bash -c zero": r"""
srun bash -c 'exec python3 -u "$0" "$@"' /m/pretrain_gpt.py --x 1
""",
    "env assign": r"""
srun env A=1 bash -c 'python3 /m/pretrain_gpt.py --x ${A:-none}'
""",
    "train in subst": r"""
OUT=$(srun python3 /m/pretrain_gpt.py --x 1)
""",
    "IFS restore": r"""
O=$IFS; IFS=,; A=(a,b); set -- a,b; IFS=$O; X=$#
""",
    "unset -f": r"""
f() { X=1; }; unset -f f; f 2>/dev/null; X=${X:-0}
""",
    "while status": r"""
i=0; while (( i++ < 3 )); do X=$X$i; done
""",
    "assign status": r"""
A=$(false) && X=1 || X=2
""",
    "func output status": r"""
f() { echo a; return 1; }; A=$(f) && X=1 || X=2
""",
    "heredoc script positional": r"""
cat > s.sh <<'E'
srun python3 /m/pretrain_gpt.py --x "$1" "${@:2}"
E
bash s.sh 'a b' --y 2
""",
    "printf list": r"""
X=$(printf '%s,' a b c)
""",
    "arith nested var": r"""
A=B; B=4; X=$((A))
""",
    "ifs mixed": r"""
IFS=', '; A='a , b,,c'; srun python3 /m/pretrain_gpt.py --x $A
""",
    "unquoted default split": r"""
srun python3 /m/pretrain_gpt.py ${A:---x 1 --y 2}
""",
    "tilde colon": r"""
X=~/a:~/b
""",
    "brace with var in": r"""
A=q; srun python3 /m/pretrain_gpt.py --x {$A,b}
""",
}
NAMED = {
    "extglob replace": r"""
shopt -s extglob
A=aaab; X=${A//+(a)/x}
""",
    "extglob strip": r"""
shopt -s extglob
A='  ab'; X=${A##*( )}
""",
    "extglob": r"""
shopt -s extglob
[[ 1b3 == @(1b3|2b7) ]] && X=1
""",
    "falls through &": r"""
case a in a) X=1 ;& b) X=${X}2 ;; *) X=${X}3 ;; esac
""",
    "falls through": r"""
case a in a) X=1 ;;& b) X=${X}2 ;;& *) X=${X}3 ;; esac
""",
    "printf star": r"""
X=$(printf '%*d' 5 3)
""",
    "a wide format": r"""
X=$(printf %999999999d 1)
""",
    "xargs": r"""
echo '--a 1' | xargs python3 /m/pretrain_gpt.py --bf16
""",
    "xargs <": r"""
xargs python3 /m/pretrain_gpt.py --bf16 < list.txt
""",
    "parallel": r"""
parallel python3 /m/pretrain_gpt.py --bf16 ::: 1 2
""",
    "unknown word behind save": r"""
LATEST=$(ls /nope 2>/dev/null)
if [ -n "$LATEST" ]; then L='--load /a --finetune'; fi
srun python3 /m/pretrain_gpt.py --bf16 --save /x $L --lr 1
""",
    "unknown subst behind save": r"""
srun python3 /m/pretrain_gpt.py --bf16 --save /x $(python3 -c 1) --lr 1
""",
    "unset behind tb": r"""
srun python3 /m/pretrain_gpt.py --bf16 --tensorboard-dir /x $NOPE
""",
    "read backslash": r"""
read a <<< 'q\w'
X=$a
""",
    "mapfile -d": r"""
mapfile -t -d , H <<< 'a,b'
X=${#H[@]}
""",
    "nullglob": r"""
shopt -s nullglob
A=(/nope*)
X=${#A[@]}
""",
    "nocasematch case": r"""
shopt -s nocasematch
case ABC in abc) X=1 ;; *) X=2 ;; esac
""",
    "tilde user": r"""
X=~root
""",
    "lastpipe": r"""
shopt -s lastpipe; X=1; echo 5 | read X
""",
    "pipestatus": r"""
true | false; X=${PIPESTATUS[1]:-7}
""",
    "uid": r"""
X=${UID:-7}
""",
    "bash version": r"""
[ ${BASH_VERSINFO[0]:-0} -ge 4 ] && X=new || X=old
""",
    "bash source default": r"""
X=${BASH_SOURCE[0]:-none}
""",
    "epoch": r"""
X=${EPOCHSECONDS:-0}
""",
    "job id +x": r"""
X=${SLURM_JOB_ID+yes}
""",
    "array slice neg": r"""
A=(1 2 3 4); X=${A[*]: -2}; X=${X// /_}
""",
    "array slice sparse": r"""
A=([2]=a [5]=b); X=${A[*]:3}
""",
    "declare -u": r"""
declare -u N; N=abc; X=$N
""",
    "type": r"""
type nope >/dev/null 2>&1 && X=1 || X=2
""",
    "cd fails": r"""
cd /nope 2>/dev/null || X=none
""",
    "env -i": r"""
export A=1
srun env -i bash -c 'python3 /m/pretrain_gpt.py --x ${A:-none}'
""",
    "env -u": r"""
export A=1
srun env -u A bash -c 'python3 /m/pretrain_gpt.py --x ${A:-none}'
""",
    "unknown export": r"""
A=1; nvidia-smi && export A; srun bash -c 'python3 /m/pretrain_gpt.py --x ${A:-none}'
""",
    "unknown func": r"""
f() { X=1; }; nvidia-smi && f() { X=2; }; f
""",
    "unknown opts": r"""
nvidia-smi && set -a; A=1; srun bash -c 'python3 /m/pretrain_gpt.py --x ${A:-none}'
""",
    "unknown keyed": r"""
nvidia-smi && declare -A M; M[a]=1; M[b]=2; X=${M[a]}
""",
    "unknown for": r"""
for n in $(nvidia-smi); do X=1; done; X=${X:-0}
""",
    "unknown in arr": r"""
A=(a $(nvidia-smi) b); X=${#A[@]}
""",
    "unknown in arr idx": r"""
A=(a $(nvidia-smi) b); X=${A[2]}
""",
    "unknown set words": r"""
set -- a $(nvidia-smi) b; X=$#
""",
    "unknown func args": r"""
f() { X=$2; }; f $(nvidia-smi) b
""",
    "unset in arr": r"""
A=(a $NOPE b); X=${#A[@]}
""",
    "declare +x": r"""
export A=1; declare +x A; srun bash -c 'python3 /m/pretrain_gpt.py --x ${A:-none}'
""",
    "declare -p": r"""
A=1; X=$(declare -p A)
""",
    "break 2": r"""
for i in 1 2; do for j in 1 2; do X=$X$i$j; break 2; done; done
""",
    "sed -i file": r"""
echo A=1 > f.sh; sed -i s/1/2/ f.sh; source ./f.sh; X=$A
""",
    "unknown file": r"""
echo X=1 > f.sh; nvidia-smi && echo X=2 > f.sh; source ./f.sh
""",
    "unset set words": r"""
set -- a $NOPE b; X=$#
""",
    "srun export none": r"""
export A=1
srun --export=NONE bash -c 'python3 /m/pretrain_gpt.py --x ${A:-none}'
""",
    "heredoc script vars": r"""
L=3
cat > s.sh <<E
H=\$((L*2))
srun python3 /m/pretrain_gpt.py --x $L --y \${H:-4}
E
bash s.sh
""",
    "assoc list form": r"""
declare -A M=(a 1 b 2); X=${M[a]}
""",
    "file cp existing": r"""
echo 'LAYERS=4' > o.sh; cp o.sh sizes.sh; source ./sizes.sh; X=$LAYERS
""",
    "file sed existing": r"""
sed -i s/5/6/ sizes.sh; source ./sizes.sh; X=$LAYERS
""",
    "heredoc default quote": r"""
X=$(cat <<E
${NOPE:-"q"}
E
)
""",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.txt").write_text("a 1\nb 2\n# c\n\nd 3")
    (tmp_path / "sizes.sh").write_text("LAYERS=5\n")
    (tmp_path / "a.sh").write_text("X=$1\n")
    return tmp_path


def launcher(folder: Path, text: str) -> Path:
    file = folder / "train.sbatch"
    file.write_text(f"{HEAD}{text}\n{'' if 'pretrain_' in text else TRAINING}")
    return file


@pytest.mark.parametrize("text", TAKEN.values(), ids=TAKEN)
def test_what_bash_starts_is_what_is_read(text: str, folder: Path) -> None:
    file = launcher(folder, text)
    training = read_launcher(file, ENVIRONMENT).training
    assert training is not None
    assert training.words[training.program + 1 :] == started(file, folder)


@pytest.mark.parametrize("text", NAMED.values(), ids=NAMED)
def test_what_bash_may_make_of_it_is_named(text: str, folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_launcher(launcher(folder, text), ENVIRONMENT)
    assert caught.value.where
    assert caught.value.hint


def test_options_of_a_sbatch_that_a_launcher_calls_for_itself_are_named(folder: Path) -> None:
    call = 'if [ -z "$SLURM_JOB_ID" ]; then exec sbatch --nodes=4 --time=1:00:00 --dependency=singleton "$0"; fi\nX=1'
    file = launcher(folder, call)
    (error,) = adopt(file, {}, site="generic").errors
    assert "sbatch --nodes holds over the lines #SBATCH" in error.message
    assert error.where == f"{file}:4"
    assert adopt(file, {"SLURM_JOB_ID": "1"}, site="generic").errors == []


def test_variables_of_the_job_are_those_that_slurm_sets(folder: Path) -> None:
    """Without --ntasks Slurm sets no SLURM_NTASKS, and without --nodes nobody knows how many there are."""
    for header, name in (("-N 2", "SLURM_NTASKS"), ("-n 8", "SLURM_NNODES"), ("-p a,b", "SLURM_JOB_PARTITION")):
        file = folder / "job.sh"
        file.write_text(f"#SBATCH {header} -t 1:00:00\nX=${{{name}:-other}}\n{TRAINING}")
        with pytest.raises(ConfigError, match="has a value in a job alone"):
            adopt(file, {}, site="generic")


def test_what_the_chain_does_anyway_is_taken(folder: Path) -> None:
    file = launcher(folder, "X=1")
    file.write_text(file.read_text().replace("--nodes=2", "--dependency=singleton --nodes=2-2"))
    found = adopt(file, {}, site="generic")
    assert (found.errors, found.settings["job"]["nodes"]) == ([], 2)


def test_a_variable_with_text_of_a_launcher_is_no_command(folder: Path) -> None:
    """Bash computes patterns, formats and numbers; texts of a launcher are its parameters."""
    hostile = "'a[$(touch hacked)]'"
    for text in ("X=$((%s))", "A=%s; X=$((A))", "A=%s; [[ $A -eq 1 ]] && X=1", "let %s"):
        with pytest.raises(ConfigError):
            read_launcher(launcher(folder, text.replace("%s", hostile)), ENVIRONMENT)
    for text in ("printf -v X q%s", "A=%s; X=q${A#b}", "[[ %s == b* ]]; X=1", "A=$%s; X=1"):
        read_launcher(launcher(folder, text.replace("%s", hostile)), ENVIRONMENT)
    assert not (folder / "hacked").exists()


@pytest.mark.parametrize("option", ["--gres=gpu:a100:4", "--gpus-per-node=a100:4", "--gpus=a100:8", "-G gpu:a100:8"])
def test_the_type_of_a_gpu_is_kept(option: str, folder: Path) -> None:
    file = launcher(folder, "X=1")
    file.write_text(file.read_text().replace("--nodes=2", f"--nodes=2 {option}"))
    job = adopt(file, {}, site="generic").settings["job"]
    assert (job["gpus_per_node"], job["sbatch"]) == (4, {"gres": "gpu:a100:4"})


def test_a_job_begins_in_the_folder_of_its_header(folder: Path) -> None:
    file = launcher(folder, "X=$PWD/data")
    file.write_text(file.read_text().replace("--nodes=2", "--nodes=2 --chdir=/proj"))
    assert adopt(file, {"PWD": "/home/ada"}, site="generic").settings["megatron_lm"]["args"]["x"] == "/proj/data"


def test_tasks_of_an_unknown_number_of_nodes_are_named(folder: Path) -> None:
    """Slurm puts them on as many nodes as it likes."""
    file = launcher(folder, "X=1")
    file.write_text(file.read_text().replace("--nodes=2 --ntasks-per-node=4", "--ntasks=8"))
    (error,) = adopt(file, {}, site="generic").errors
    assert "#SBATCH --ntasks=8 is not taken" in error.message
