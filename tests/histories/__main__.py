"""`python -m tests.histories SEED`: replay one history; `FIRST LAST`: play many, and print those that break a law, or
end with `--first` one."""

from __future__ import annotations

import sys
import time
from collections import Counter

from .story import play


def main() -> int:
    """Play the histories of the command line; return 1 if one breaks a law."""
    numbers = [int(word) for word in sys.argv[1:] if word != "--first"]
    if len(numbers) == 1:
        outcome = play(numbers[0])
        print("\n".join(outcome.lines))
        print(f"{outcome.jobs} starts of jobs, iteration {outcome.durable}, {outcome.ended}")
        print("\n".join(outcome.broken) or "every law holds")
        return 1 if outcome.broken else 0
    began, used, broken = time.perf_counter(), time.process_time(), 0
    ends: Counter[str] = Counter()
    for seed in range(*numbers):
        outcome = play(seed)
        ends[outcome.ended.partition(" reason")[0].removeprefix("state: ")] += 1
        if outcome.broken:
            broken += 1
            if "--first" in sys.argv:
                return 1
            print(f"seed {seed} ({', '.join(outcome.events)}): {outcome.broken[0]}", flush=True)
    count = numbers[1] - numbers[0]
    seconds, cpu = time.perf_counter() - began, time.process_time() - used
    print(f"{count} histories, {broken} break a law; {seconds:.1f} s, {1000 * cpu / count:.1f} ms of CPU each")
    print(", ".join(f"{end or '-'}: {number}" for end, number in sorted(ends.items())))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
