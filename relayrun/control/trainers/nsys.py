"""The command of Nsight Systems that stands before a rank's program."""

from __future__ import annotations

from collections.abc import Sequence

NSYS_TRACE = "nvtx,cudnn,cublas,cuda"


def nsys_command(output: str, options: Sequence[str] = ()) -> list[str]:
    """Return the words before the program of a rank.

    Recorded is what lies between cudaProfilerStart and cudaProfilerStop. `output`: a file a rank; nsys fills in `%h`
    and `%q{VARIABLE}`. `options`: further ones, `--NAME=VALUE`, which take the place of those that are here by default.
    """
    own = [
        "--sample=none",
        f"--trace={NSYS_TRACE}",
        f"--output={output}",
        "--force-overwrite=true",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
    ]
    given = {option.partition("=")[0] for option in options}
    return ["nsys", "profile", *(option for option in own if option.partition("=")[0] not in given), *options]
