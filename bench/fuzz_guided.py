#!/usr/bin/env python3
"""Look for what breaks one reader with a fuzzer that is guided by coverage: atheris, of PyPI.

Inputs that reach new lines are kept in WORK/READER/corpus, what broke it in WORK/READER/finds, one
of each place, and WORK/READER/log.tsv has a line for each run: seconds, executions, finds. Runs
add up: a second one goes on from the corpus of the first. The last byte of an input is the number
of its use; the rest is the file. What is not Python (numpy, Arrow) is not seen by it.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["waitfold"], enable_loader_override=False):
    import fuzz_cases


def main() -> None:
    """Run the fuzzer, or one input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reader", choices=fuzz_cases.READERS)
    parser.add_argument("--seconds", type=int, default=1800)
    parser.add_argument("--work", type=Path, default=Path("fuzz-work"))
    parser.add_argument("--only", type=Path, help="run this input alone")
    options = parser.parse_args()
    reader = fuzz_cases.READERS[options.reader]()
    work = options.work / options.reader.replace(" ", "-")
    corpus, finds, log = work / "corpus", work / "finds", work / "log.tsv"
    scratch = Path(tempfile.mkdtemp())
    if options.only:
        content = options.only.read_bytes()
        use = reader.uses[content[-1] % len(reader.uses)]
        print(use.argv, use.base, use.file, *fuzz_cases.Runner(scratch).run(content[:-1], use))
        shutil.rmtree(scratch)
        return
    for folder in (corpus, finds):
        folder.mkdir(parents=True, exist_ok=True)
    for number, (seed, uses) in enumerate(reader.seeds):
        for use in uses:
            (corpus / f"seed-{number}-{use}").write_bytes(seed + bytes([use]))
    others = [seed for seed, _ in reader.seeds]
    before = log.read_text() if log.exists() else ""
    begun = time.monotonic()
    executions = found = 0
    runner: list[fuzz_cases.Runner] = []

    def note() -> None:
        seconds = time.monotonic() - begun
        log.write_text(f"{before}{seconds:.0f}\t{executions}\t{found}\n")

    def one(content: bytes) -> None:
        nonlocal executions, found
        if not runner:  # only now is the fuzzer's own memory there
            runner.append(fuzz_cases.Runner(scratch))
        if not content:
            return
        outcome, wrong = runner[0].run(content[:-1], reader.uses[content[-1] % len(reader.uses)])
        executions += 1
        if wrong:
            places = re.findall(r'/waitfold/(\S+\.py)", line (\d+)', wrong)
            kind = wrong.rstrip().rpartition("\n")[2].partition(":")[0]
            place = f"{outcome}-{kind}-{'-'.join(places[-1]) if places else ''}".replace("/", "_")
            name = re.sub(r"[^\w.-]", "_", place)[:100]
            if not (finds / f"{name}.txt").exists():
                found += 1
                (finds / f"{name}.txt").write_text(wrong)
                (finds / f"{name}.bin").write_bytes(content)
        if executions % 50 == 0 or wrong:
            note()

    def mutated(content: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.4 or len(content) < 20:
            return bytes(atheris.Mutate(content, most))
        data, last = bytearray(content[:-1]), content[-1]
        rng.choice(reader.mutations)(rng, data, others)
        if rng.random() < 0.1:
            last = rng.randrange(len(reader.uses))
        return bytes(data[: most - 1]) + bytes([last])

    largest = max(len(seed) for seed in others) * 5 // 4 + 100
    sys.argv = [
        sys.argv[0],
        str(corpus),
        f"-max_total_time={options.seconds}",
        f"-max_len={largest}",
        f"-seed={int(hashlib.sha256(before.encode()).hexdigest()[:7], 16)}",
        f"-artifact_prefix={finds}/",
        "-timeout=0",
        "-rss_limit_mb=2048",
        "-print_final_stats=1",
    ]
    atheris.Setup(sys.argv, one, custom_mutator=mutated)
    try:
        atheris.Fuzz()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
