"""How fast is preparation? Interleaved: `pretrain prepare`; nanoGPT's way (tiktoken inside datasets.map, then concatenated into one
file, as its data/openwebtext/prepare.py does); and tiktoken alone on texts in memory, one process per core: the bound.

    python scripts/benchmark_prepare.py CORPUS.jsonl [--rounds 3]

The text is in the field `text`. Each round runs each way once, in processes of their own, caches of `datasets` emptied.
"""

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pretrain.tokenization import load

U16 = np.dtype("<u2")


def ours(corpus: Path, folder: Path) -> float:
    command = [sys.executable, "-m", "pretrain.cli", "prepare", str(corpus), "--output", str(folder / "set"), "--val-fraction", "0.0005"]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])})
    return time.perf_counter() - start


def nanogpt(corpus: Path, folder: Path) -> float:
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, __file__, "--nanogpt", str(corpus), str(folder)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    return time.perf_counter() - start


def nanogpts_way(corpus: Path, folder: Path) -> None:
    """The steps of nanoGPT's preparation, on a file instead of the hub."""
    import datasets
    import tiktoken

    from pretrain import tokenization

    spec = json.loads(load("gpt2").files["tokenizer.json"])
    byte = {char: byte for byte, char in enumerate(tokenization._byte_characters())}
    ranks = {bytes(byte[char] for char in token): id_ for token, id_ in spec["model"]["vocab"].items() if "<|" not in token}
    encoding = tiktoken.Encoding("gpt2", pat_str=tokenization.GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256})

    def process(row: dict[str, str]) -> dict[str, object]:
        ids = [*encoding.encode_ordinary(row["text"]), 50256]
        return {"ids": ids, "len": len(ids)}

    cores = len(os.sched_getaffinity(0))
    found = datasets.load_dataset("json", data_files=str(corpus), split="train", cache_dir=str(folder / "cache"))
    split = found.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    tokenised = split.map(process, remove_columns=found.column_names, num_proc=cores)
    for name, rows in tokenised.items():
        out = np.memmap(folder / f"{name}.bin", U16, "w+", shape=(int(np.sum(rows["len"], dtype=np.uint64)),))
        at, batches = 0, min(1024, len(rows))
        for index in range(batches):
            batch = rows.shard(num_shards=batches, index=index, contiguous=True).with_format("numpy")
            ids = np.concatenate(batch["ids"])
            out[at : at + len(ids)] = ids
            at += len(ids)
        out.flush()


def tokenise_all(texts: list[bytes], ready: "multiprocessing.synchronize.Barrier") -> None:
    encode = load("gpt2").encoder(U16)
    ready.wait()
    for text in texts:
        encode(text)
    ready.wait()


def tiktoken_alone(corpus: Path, _: Path) -> float:
    """From when all processes hold their texts to when all have tokenised them."""
    with open(corpus, "rb") as lines:
        texts = [json.loads(line)["text"].encode() for line in lines]
    cores = len(os.sched_getaffinity(0))
    context = multiprocessing.get_context("fork")
    ready = context.Barrier(cores + 1)
    processes = [context.Process(target=tokenise_all, args=(texts[k::cores], ready)) for k in range(cores)]
    for process in processes:
        process.start()
    ready.wait()
    start = time.perf_counter()
    ready.wait()
    seconds = time.perf_counter() - start
    for process in processes:
        process.join()
    return seconds


def cpu_seconds() -> float:
    """Of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nanogpt", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.nanogpt:
        nanogpts_way(options.corpus, options.folder)
        return
    ways: dict[str, Callable[[Path, Path], float]] = {"pretrain prepare": ours, "nanoGPT's way": nanogpt, "tiktoken alone": tiktoken_alone}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    of_cpu: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            folder = Path(tempfile.mkdtemp())
            before = cpu_seconds()
            seconds[name].append(way(options.corpus, folder))
            of_cpu[name].append(cpu_seconds() - before)
            shutil.rmtree(folder)
    megabytes = options.corpus.stat().st_size / 1e6
    best = statistics.median(seconds["pretrain prepare"])
    print(f"{'':<20}{'median s':>10}{'MB/s':>8}{'ours is':>12}{'CPU s':>8}   rounds")
    for name, measured in seconds.items():
        median = statistics.median(measured)
        print(
            f"{name:<20}{median:>10.2f}{megabytes / median:>8.1f}{median / best:>11.2f}×{statistics.median(of_cpu[name]):>8.1f}   {', '.join(f'{s:.2f}' for s in measured)}"
        )


if __name__ == "__main__":
    main()
