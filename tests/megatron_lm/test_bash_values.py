"""Flags from the Bash arrays of a launcher: as Bash takes them; what could run is refused with its line."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from relayrun.errors import ConfigError
from relayrun.submit.megatron_lm.launcher_file import read_launcher

VARIABLES = {"SEQ_LEN": "8192", "MBS": "1", "GBS": "128", "EXP_NAME": "a[$(touch hacked)]", "EMPTY": ""}
HINTS = {"TRAINING_STEPS": "training.steps", "MBS": "training.micro_batch_size"}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "launcher.sh"


def words(script: Path, text: str) -> list[str]:
    """The words of all flags of a script."""
    script.write_text(text)
    return [word for each in read_launcher(script, VARIABLES, {}, HINTS).flags for word in each.words]


def refused(script: Path, text: str) -> ConfigError:
    script.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_launcher(script, VARIABLES, {}, HINTS)
    return caught.value


TAKEN = {
    "comments inside": "A_ARGS=(\n  --a 1 # not ) the end $(rm)\n  # --b 2 `rm`\n  --c#d 3\n)\n",
    "a comment behind the parenthesis": "A_ARGS=(# ) $(rm)\n--a 1)",
    "parentheses in texts": "A_ARGS=( --a ')' --b \")\" --c \\) --d '([0]*3+[1]*1)*3' )",
    "single quotes hold all": "A_ARGS=( --a '$(rm) `rm` $SEQ_LEN' )",
    "escaped": 'A_ARGS=( --a \\$\\(rm\\) --b "\\$(rm) \\`rm\\`" )',
    "ansi quotes": "A_ARGS=( --a $'it\\'s )\\n' )",
    "variables": 'A_ARGS=( --a $SEQ_LEN --b "${MBS}" --c x${GBS}y --d "$EMPTY" --e $EMPTY )',
    "defaults": 'A_ARGS=( --a ${NONE:-7} --b "${NONE-a b}" --c ${MBS:+set} --d ${NONE:-$SEQ_LEN} )',
    "a default with quotes": "A_ARGS=( --a ${NONE:-'} x'} --b ${NONE:-\"} y\"} )",
    "appended": "A_ARGS=( --a 1 )\nB_ARGS=( --b 1 )\nA_ARGS+=( --c 1 )\n",
    "set twice": "A_ARGS=( --a 1 )\nA_ARGS=( --b 1 )\n",
    "an array in an array": 'A_ARGS=( --a 1 )\nB_ARGS=( "${A_ARGS[@]}" --b 1 )\n',
    "arithmetic": "A_ARGS=( --a $((GBS / MBS + 2 * 3)) --b $(( (SEQ_LEN) % 7 )) )",
    "continued lines": "A_ARGS=( --a \\\n 1 --b 2\\\n3 )",
    "braces": "A_ARGS=( --a {1..3} x{a,b} )",
    "quoted patterns": "A_ARGS=( --a '*' \"??\" x\\[0-9] )",
    "several on a line": "A_ARGS=( --a 1 ) B_ARGS=( --b 2 ); C_ARGS=(--c 3)",
    "no blank": "A_ARGS=(--a 1)",
    "empty": "A_ARGS=()\nB_ARGS=( --b 1 )",
    "negative numbers": "A_ARGS=( --a -1 -2.5e-3 )",
    "a quote in a default": 'A_ARGS=( --a "${NONE:-"}"}" )',
    "set by default": "A_ARGS=( --a ${NONE:=x} --b $NONE )",
    "lengths and replacements": "A_ARGS=( --a ${#SEQ_LEN} --b ${MBS//1/$((1 + 1))} --c ${SEQ_LEN%2} )",
    "assigned in arithmetic": "A_ARGS=( --a $((x = 5)) --b $((GBS++)) --c $GBS --d $x )",
    "a text to be translated": 'A_ARGS=( --a $"text" )',
    "an index": "A_ARGS=( [1]=--b [0]=--a )",
    "a branch": "if true; then A_ARGS=( --a 1 ); fi",
    "a loop": "for i in 1 2; do A_ARGS+=( --a $i ); done",
    "a clause": "case x in x) A_ARGS=( --a 1 ) ;; esac",
    "declared": "declare -a A_ARGS=( --a 1 )",
    "a default that is not needed": "A_ARGS=( --a ${MBS:-$(touch hacked)} )",
    "no positional parameters": 'A_ARGS=( --a "$@" )',
}
"""Scripts that hold nothing but arrays: what Bash itself makes of them is what must come out."""


@pytest.mark.parametrize("text", TAKEN.values(), ids=TAKEN)
def test_as_bash_has_it(script: Path, tmp_path: Path, text: str) -> None:
    names = [f"{name}_ARGS" for name in "ABC" if f"{name}_ARGS" in text]
    show = "".join(f'\nfor w in "${{{name}[@]}}"; do printf \'%s\\0\' "$w"; done' for name in names)
    empty = tmp_path / "empty"
    empty.mkdir()
    bash = subprocess.run(
        ["bash", "-c", f"{text}{show}"],
        env=VARIABLES,
        cwd=empty,
        capture_output=True,
        check=True,
        text=True,
        timeout=600,
    )
    assert bash.stderr == ""
    assert words(script, text) == bash.stdout.split("\0")[:-1]


AROUND = {
    "other lines do not run": "touch hacked\nA_ARGS=( --a 1 )\nexit 1\n",
    "other arrays": "FLAGS=( $(touch hacked) )\nA_ARGS=( --a 1 )",
    "a text in a comment": "# A_ARGS=( --b 2 )\nA_ARGS=( --a 1 )",
    "a text in quotes": "echo 'A_ARGS=( --b 2 )' \"A_ARGS=( --b 2\n)\"\nA_ARGS=( --a 1 )",
    "a here-document": "cat <<EOF\nA_ARGS=( --b $(touch hacked) )\nEOF\nA_ARGS=( --a 1 )",
    "two here-documents": "cat <<'E F' <<-X\nA_ARGS=( --b\nE F\n\tA_ARGS=(\n\tX\nA_ARGS=( --a 1 )",
    "a here-string": "cat <<< 'A_ARGS=(' >/dev/null\nA_ARGS=( --a 1 )",
    "branches, loops, functions": (
        "if [[ $x =~ ^(a|b)$ ]]; then for i in 1 2; do while :; do break; done; done; else case $x in a) ;; (b|c) "
        "echo in; ;; *) f ;; esac; fi\nf() { echo hi; }\nfunction g { :; }\n(cd x && ls)\n((x << 2))\n"
        "for ((i = 0; i < 3; i++)); do :; done\n{ echo a; }\nA_ARGS=( --a 1 )\n"
    ),
    "keywords that are words": "echo if for { case\nA_ARGS=( --a 1 )",
    "substitutions": 'x=$(f ")" \')\' $(g))\ny=`h`\nz="${x:-$(k "}")}"\nA_ARGS=( --a 1 )\n',
    "the earlier system's data": 'A_ARGS=( --a 1 )\nif x; then\n  DATA_ARGS="${DATA_ARGS[@]} --mock-data"\nfi\n',
    "redirections": "exec 2>&1 >log &>x 2>> y < <(touch hacked) > >(touch hacked)\nA_ARGS=( --a 1 )",
    "texts of several lines": "x='\nA_ARGS=( --b 2 )\n'\nA_ARGS=( --a 1 )",
}
"""Scripts around one array A_ARGS=( --a 1 )."""


@pytest.mark.parametrize("text", AROUND.values(), ids=AROUND)
def test_no_other_line_runs(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    subprocess.run(["bash", "-n", "-c", text], check=True)
    monkeypatch.chdir(tmp_path)
    assert words(script, text) == ["--a", "1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["launcher.sh"]


OUTPUT = "$(touch hacked), which nobody runs here"
REFUSED = {
    "$(touch hacked)": OUTPUT,
    '"$(touch hacked)"': OUTPUT,
    "`touch hacked`": OUTPUT,
    '"`touch hacked`"': OUTPUT,
    "x$(touch hacked)": OUTPUT,
    "${NONE:-$(touch hacked)}": OUTPUT,
    '"${NONE:-`touch hacked`}"': OUTPUT,
    "${NONE:-${NONE:-$(touch hacked)}}": OUTPUT,
    "${NONE:-<(touch hacked)}": "a process substitution",
    "<(touch hacked)": "a process substitution",
    ">(touch hacked)": "a process substitution",
    "\"${NONE:-'}$(touch hacked)'}\"": "a quote inside of a quoted ${...}",
    "${!EXP_NAME}": "the name of a variable is not known here",
    "${EXP_NAME@P}": "${NAME@P} is not read",
    "${MBS[$(touch hacked)]}": "$MBS has no value",
    "${MBS:EXP_NAME}": "the arithmetic 'a[$(touch hacked)]' is not read",
    "${NONE:?$(touch hacked)}": "$NONE has no value",
    "$((a[$(touch hacked)]))": "$a has no value",
    "$((EXP_NAME))": "the arithmetic 'a[$(touch hacked)]' is not read",
    "$((NONE + 1))": "$NONE has no value",
    "$((2 ** -1))": "is not read",
    "$((NONE = $(touch hacked)))": OUTPUT,
    "$((`touch hacked`))": OUTPUT,
    "$[1 + 1]": "arithmetic in brackets",
    "[EXP_NAME]=x": "the arithmetic 'a[$(touch hacked)]' is not read",
    '["a b"]=x': "the index of an element is not known here",
    "*.bin": "a pattern of files, and nobody knows in which folder",
    "x[0-9]": "a pattern of files, and nobody knows in which folder",
    "$1": "$1 has no value",
    "$?": "$? has a value in a job alone",
    "a;b": "an unquoted ';'",
    "a & b": "an unquoted '&'",
    "a | b": "an unquoted '|'",
    "a > hacked": "an unquoted '>'",
    "<<EOF": "an unquoted '<'",
    "(a)": "an unquoted '('",
    "$NONE": "$NONE has no value",
    "$TRAINING_STEPS": "$TRAINING_STEPS has no value: set training.steps",
    "$SLURM_JOB_ID": "$SLURM_JOB_ID has a value in a job alone",
    "$SEQ_LEM": "did you mean 'SEQ_LEN'?",
}


@pytest.mark.parametrize(("word", "why"), REFUSED.items(), ids=REFUSED)
def test_what_only_a_job_knows_is_refused_with_its_line(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    error = refused(script, f"#!/bin/bash\nA_ARGS=(\n  --a 1\n  --b {word}\n)\n")
    assert why in error.message
    assert error.where in (f"{script}:3" if len(word) < 11 and "unquoted" in why else "", f"{script}:4")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["launcher.sh"]


NO_ARRAY = "this file starts no training, and has no array of flags"
PLACES = {
    "f() {\nA_ARGS=( --a 1 )\n}": (NO_ARRAY, None),
    "(\nA_ARGS=( --a 1 ) )": (NO_ARRAY, None),
    "x=$(\nA_ARGS=( --a 1 )\n)": (NO_ARRAY, None),
    "A_ARGS=( --a 1\n": ("a ( is not closed", 1),
    "A_ARGS=( --a '1 )\n": ("a ' is not closed", 1),
    'A_ARGS=( --a "1 )\n': ('a " is not closed', 1),
    "A_ARGS=( --a 1 )\ncat <<EOF\n": ("the here-document that 'EOF' ends does not end", 3),
    "A_ARGS=( --a 1 )\nfi\n": ("this is no Bash: syntax error near unexpected token `fi'", 2),
    "A_ARGS=( --a 1 )x": ("A_ARGS goes on behind its last parenthesis", 1),
    "A_ARGS=( --a 1 )\n)y;;\n": ("')' closes nothing", 2),
    "A_ARGS=( --a 1 )\nx & ; y\n": ("this is no Bash: syntax error near unexpected token `;'", 2),
    "if x; then\nA=1\n": ("'fi' is missing", 3),
    "A_ARGS=( --a 1 )\nwhile true; do :; done\n": ("more than 200000 commands", 2),
    "f() { f; }\nf\nA_ARGS=( --a 1 )": ("f calls itself", 1),
}


@pytest.mark.parametrize(("text", "expected"), PLACES.items(), ids=range(len(PLACES)))
def test_what_holds_no_array_or_is_no_bash_is_refused(script: Path, text: str, expected: tuple[str, int]) -> None:
    error = refused(script, text)
    assert expected[0] in error.message
    assert error.where == (str(script) if expected[1] is None else f"{script}:{expected[1]}")


def test_files_that_are_no_launchers(script: Path, tmp_path: Path) -> None:
    assert "no array of flags" in refused(script, "echo hi\n").message
    assert "a carriage return" in refused(script, "A_ARGS=( --a 1 )\r\n").message
    assert "'1' stands behind no flag" in refused(script, "A_ARGS=( 1 --a )").message
    script.write_bytes(b"A_ARGS=( --a \xff )")
    with pytest.raises(ConfigError, match="is no text in UTF-8"):
        read_launcher(script, VARIABLES, {}, HINTS)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_launcher(tmp_path / "none", VARIABLES)


def test_arithmetic_without_a_value_is_told(script: Path) -> None:
    error = refused(script, "A_ARGS=( --a $((1 / 0)) )")
    assert "the arithmetic '1 / 0' is not read" in error.message
