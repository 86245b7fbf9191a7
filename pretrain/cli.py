"""The `pretrain` command. Each verb reads its arguments, calls one function and prints what came of it."""

import argparse
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pretrain import __version__

_EPILOG = """examples:
  pretrain prepare speeches/ --output data/speeches
  pretrain train configs/quickstart.yaml train.max_steps=100
  pretrain generate runs/quickstart --prompt "My fellow citizens"
"""


_TO_MEND = (errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # of what the system says, what the user can


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 for what the user can mend, 1 for a failure, 75 for what was stopped on request and goes on."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    launcher_flags = []
    if arguments[:1] == ["train"] and "--" in arguments:
        cut = arguments.index("--")
        arguments, launcher_flags = arguments[:cut], arguments[cut + 1 :]
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.verb is compare and sum((options.config is not None, bool(options.merge), options.parity)) != 1:
        parser.error("compare: give either a config, --merge or --parity")
    options.launcher_flags = launcher_flags
    verb: Callable[[argparse.Namespace], int] = options.verb
    again = "goes on where it was" if verb is prepare else "merges from the beginning" if verb is merge else None
    if again:
        for request in (signal.SIGTERM, signal.SIGHUP):  # what schedulers send, and a terminal that is closed
            if signal.getsignal(request) is not signal.SIG_IGN:  # as under nohup
                signal.signal(request, signal.default_int_handler)
    try:
        return verb(options)
    except KeyboardInterrupt:
        print(f"interrupted; the same command {again}" if again else "interrupted", file=sys.stderr)
        return 75 if again else 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except OSError as error:
        if error.errno not in _TO_MEND:
            raise
        print(
            f"{error.filename}: {error.strerror}" if error.filename else f"{error.strerror}: nothing more can be written", file=sys.stderr
        )
        return 2
    except ValueError as error:  # ours carry one line for the user; anything else is a defect and shows its traceback
        if not type(error).__module__.startswith("pretrain."):
            raise
        print(error, file=sys.stderr)
        return 2


def prepare(o: argparse.Namespace) -> int:
    from pretrain import corpus

    of_dataset = {"--config": o.config, "--split": o.split, "--streaming": o.streaming}
    if not o.dataset and (flags := [flag for flag, value in of_dataset.items() if value]):
        raise corpus.CorpusError(f"{flags[0]} is of a --dataset, and none is named")
    if o.dataset and o.format:
        raise corpus.CorpusError("--format is of files and standard input; a --dataset has its own")
    settings = corpus.Settings(o.tokenizer, o.val_fraction, o.val_split, o.text_field, encoding=o.encoding, documents=o.documents,
                               on_bad=o.on_bad, deduplicate=o.deduplicate)  # fmt: skip
    dataset = corpus.DatasetName(o.dataset, o.config, o.split or "train", o.streaming) if o.dataset else None
    manifest, was_there = corpus.prepare(o.source, o.output, settings, workers=o.workers, overwrite=o.overwrite, part=o.part,
                                         format=o.format and f".{o.format}", dataset=dataset)  # fmt: skip
    if manifest is None:
        print(f"part {o.part[0]} of {o.part[1]} is done; when all are: pretrain merge {o.output}")
        return 0
    print(corpus.summary(manifest))
    print(
        f"{o.output} was prepared already, from the same sources"
        if was_there
        else f"prepared {o.output}; next: pretrain inspect {o.output}"
    )
    return 0


def merge(o: argparse.Namespace) -> int:
    from pretrain import corpus, shards
    from pretrain.corpus import folder

    if o.when_complete and (o.output / shards.MANIFEST).exists() and not (o.output / folder.PARTS).exists() and not o.overwrite:
        print(f"{o.output} was merged already")
        return 0
    try:
        manifest = corpus.merge(o.output, o.workers, o.overwrite)
    except corpus.PartsMissing as missing:
        if not o.when_complete:
            raise
        print(f"not merged yet: {missing}")
        return 0
    print(corpus.summary(manifest))
    print(f"prepared {o.output}; next: pretrain inspect {o.output}")
    return 0


def train(o: argparse.Namespace) -> int:
    from pretrain import supervise

    if o.check:
        print(supervise.check(o.config, o.overrides).folder)
        return 0
    return supervise.train(o.config, o.overrides, o.launcher_flags)


def generate(o: argparse.Namespace) -> int:
    from pretrain import export, generation
    from pretrain.config import ConfigError

    trained = export.open_trained(o.run, _say)
    if trained.tokenizer is None:
        raise ConfigError(f"{o.run} has no tokenizer: it was trained on a bare set; export it and put a tokenizer beside it")
    texts = generation.generate(trained.model.as_causal_lm(), trained.tokenizer, o.prompt, vocab_size=trained.model.vocab_size,
                                max_new_tokens=o.max_new_tokens, temperature=o.temperature, top_k=o.top_k, top_p=o.top_p, seed=o.seed)  # fmt: skip
    print("\n---\n".join(texts))
    return 0


def evaluate(o: argparse.Namespace) -> int:
    from pretrain import evaluate_trained

    print(evaluate_trained.evaluate(o.run, o.data, o.split, o.micro, _say))
    return 0


def export(o: argparse.Namespace) -> int:
    from pretrain import export

    trained = export.open_trained(o.run, _say)
    export.export(trained, o.output)
    print(f"{trained.source} exported; load it with AutoModelForCausalLM.from_pretrained({str(o.output)!r})")
    return 0


def report(o: argparse.Namespace) -> int:
    from pretrain import report

    if o.wandb:
        for run in o.run:
            report.to_wandb(run, o.project)
        return 0
    output = o.output or o.run[0] / "report"
    for path in report.report(o.run, output, o.expected):
        print(path)
    return 0


def compare(o: argparse.Namespace) -> int:
    if o.parity:
        from pretrain import parity

        return 1 if parity.matrix(o.strategies, o.processes) else 0
    from pretrain import compare

    if o.merge:
        for path in compare.report(o.merge, o.output or o.merge[0] / "report"):
            print(path)
        return 0
    try:
        return compare.compare(o.config, o.overrides, lambda line: print(line, flush=True))
    except compare.Interrupted:
        print("interrupted; the same command goes on where it was", file=sys.stderr)
        return 75


def plan(o: argparse.Namespace) -> int:
    from pretrain import plan

    return plan.plan(o.config, o.overrides, o.gpu, o.nodes, o.gpus_per_node, o.measured)


def doctor(o: argparse.Namespace) -> int:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what torch would write of ranks that do not come is a finding here
    from pretrain import doctor

    return doctor.doctor(o.config, o.overrides, o.wait)


def inspect(o: argparse.Namespace) -> int:
    if (o.folder / "status.json").exists() or (o.folder / "checkpoints").is_dir():
        from pretrain import inspection

        lines: Iterable[str] = inspection.inspect_run(o.folder, ledger=o.ledger)
    else:
        from pretrain import set_inspection

        limit = None if o.verify else o.limit or None
        if o.find is not None:
            lines = set_inspection.occurrences(o.folder, o.tokenizer, o.split, o.find, o.sequence_length, limit)
        elif o.window is not None:
            lines = set_inspection.window(o.folder, o.tokenizer, o.split, o.window, o.sequence_length)
        else:
            lines = set_inspection.overview(o.folder, o.tokenizer, o.sequence_length, limit, o.verify, o.plot)
    for line in lines:
        print(line)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pretrain", description="Pretrain GPT-2, data-parallel, the same way whatever the layout.", epilog=_EPILOG,
                                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)  # fmt: skip
    parser.add_argument("--version", action="version", version=f"pretrain {__version__}")
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def add(verb: Callable[[argparse.Namespace], int], help: str, example: str) -> argparse.ArgumentParser:
        p = verbs.add_parser(verb.__name__, help=help, description=help[0].upper() + help[1:] + ".", epilog=f"example:\n  {example}",
                             formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)  # fmt: skip
        p.set_defaults(verb=verb)
        return p

    p = add(
        prepare,
        "turn text into token shards",
        "pretrain prepare input.txt --output data/mine --tokenizer byte --val-split tail --val-fraction 0.1",
    )
    p.add_argument(
        "source",
        nargs="*",
        help="files, folders or globs of .txt, .jsonl, .ndjson, .json, .csv (also .gz and .zst), .parquet and .arrow; @FILE lists paths, - is standard input",
    )
    p.add_argument("--output", type=Path, required=True, help="the set's folder, for example data/mine")
    p.add_argument(
        "--dataset", metavar="NAME", help="instead of sources: a dataset of the Hugging Face Hub, or a folder that datasets loads"
    )
    p.add_argument("--config", help="the dataset's configuration")
    p.add_argument("--split", help="the dataset's split (default train)")
    p.add_argument("--streaming", action="store_true", help="read the dataset while it is fetched, keeping nothing of it on disk")
    p.add_argument("--tokenizer", default="gpt2", help="gpt2 (default), byte, train:SIZE, or a Hugging Face name or folder")
    p.add_argument(
        "--val-fraction",
        type=float,
        default=0.01,
        help="share that validates; 0 makes no validation split (default %(default)s)",
    )
    p.add_argument(
        "--val-split",
        choices=["hash", "tail"],
        default="hash",
        help="whole documents by content hash (default), or the end of the text",
    )
    p.add_argument("--workers", type=int, help="processes (default: one per core); the bytes written are the same for any number")
    p.add_argument(
        "--text-field",
        default="text",
        help="the field or column that holds the text (default %(default)s)",
    )
    p.add_argument(
        "--documents",
        default="file",
        metavar="HOW",
        help="a .txt is one document per file (default), line, blank-line, or between SEPARATORs such as '<|endoftext|>' or '\\n---\\n'",
    )
    p.add_argument(
        "--format",
        default="",
        metavar="NAME",
        help="of the files named or matched and of standard input, for example jsonl (default: by name; txt)",
    )
    p.add_argument("--encoding", default="utf-8", help="of text, for example latin-1, cp1252, utf-16 (default %(default)s)")
    p.add_argument(
        "--on-bad",
        choices=["stop", "skip"],
        default="stop",
        help="what can't be read ends the preparation (default), or is left out and counted",
    )
    p.add_argument(
        "--deduplicate", action="store_true", help="leave out a document whose text an earlier one has; they are counted in any case"
    )
    p.add_argument("--part", type=_part, metavar="i/n", help="make only this share, for one of n array tasks; `pretrain merge` joins them")
    p.add_argument("--overwrite", action="store_true", help="replace a set that was made from other sources or settings")

    p = add(merge, "join the parts of an array job", "pretrain merge data/mine")
    p.add_argument("output", type=Path, help="the --output of every pretrain prepare --part i/n")
    p.add_argument("--workers", type=int, help="processes")
    p.add_argument("--overwrite", action="store_true", help="replace a set that is there already")
    p.add_argument("--when-complete", action="store_true", help="where parts are missing, say so and leave it to who makes the last one")

    p = add(
        train,
        "train as a config says",
        "pretrain train configs/gpt2-124m.yaml run.name=mine batch.micro=16 -- --num_processes 8",
    )
    p.add_argument("config", help="a YAML file; every key is in the README")
    p.add_argument("overrides", nargs="*", metavar="section.key=value", help="after them, `--` and flags for accelerate launch")
    p.add_argument("--check", action="store_true", help="only check the config, and print its run folder")

    p = add(generate, "continue prompts", 'pretrain generate runs/quickstart --prompt "The state of the Union"')
    p.add_argument("run", type=Path, help="a run folder, a checkpoint, or an exported folder")
    p.add_argument(
        "--prompt",
        action="append",
        required=True,
        help="may be given several times; an empty one starts a new document",
    )
    p.add_argument("--max-new-tokens", type=int, default=100)
    p.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    p.add_argument("--top-k", type=int, default=50, help="sample from so many likeliest tokens; 0 for all")
    p.add_argument("--top-p", type=float, default=1.0, help="sample from the likeliest tokens of this total probability")
    p.add_argument("--seed", type=int, default=0)

    p = add(evaluate, "exact loss over a whole split", "pretrain evaluate runs/quickstart --data data/other")
    p.add_argument("run", type=Path, help="a run folder, a checkpoint, or an exported folder")
    p.add_argument("--data", type=Path, help="a prepared set (default: the one that the run was trained on)")
    p.add_argument("--split", choices=["train", "val"], default="val")
    p.add_argument("--micro", type=int, default=8, help="sequences per forward")

    p = add(export, "write a Hugging Face folder", "pretrain export runs/quickstart --output exported/quickstart")
    p.add_argument("run", type=Path, help="a run folder or a checkpoint")
    p.add_argument("--output", type=Path, required=True)

    p = add(report, "draw runs, finished or not", "pretrain report runs/a runs/b --output report")
    p.add_argument("run", type=Path, nargs="+")
    p.add_argument("--output", type=Path, help="default: the first run's report/")
    p.add_argument("--expected", type=Path, default=Path("configs/expected"), help="folder of curves to draw behind the runs")
    p.add_argument("--wandb", action="store_true", help="rebuild the W&B runs from metrics.jsonl instead")
    p.add_argument("--project", default="pretrain", help="the W&B project")

    p = add(
        compare,
        "the same work under every strategy, and a report of what came of it",
        "pretrain compare configs/compare.yaml compare.repetitions=1\n  pretrain compare --parity --strategies ddp,fsdp2 --processes 1,2",
    )
    p.add_argument("config", type=Path, nargs="?", help="a YAML file with a section `compare`")
    p.add_argument("overrides", nargs="*", metavar="section.key=value")
    p.add_argument(
        "--merge", type=Path, nargs="+", metavar="DIR", help="instead: one report of several comparisons, made on different machines"
    )
    p.add_argument("--output", type=Path, help="of --merge (default: the first one's report/)")
    p.add_argument("--parity", action="store_true", help="instead: prove that they compute the same; status 1 where one does not")
    p.add_argument("--strategies", type=_strategies, default="", help="of --parity: names, with commas between (default: all)")
    p.add_argument("--processes", type=_counts, default="1,2,4", help="of --parity: numbers of processes (default %(default)s)")

    p = add(
        plan,
        "before launching: will it fit, how fast, how many bytes, under every strategy",
        "pretrain plan configs/gpt2-124m.yaml --gpu a100-80gb --gpus-per-node 8",
    )
    p.add_argument("config", help="a YAML file; its data need not be there")
    p.add_argument("overrides", nargs="*", metavar="section.key=value")
    p.add_argument("--gpu", metavar="NAME", help="for example h100-80gb; an unknown name lists all (default: what is here)")
    p.add_argument("--nodes", type=_at_least(1), default=1, help="default %(default)s")
    p.add_argument("--gpus-per-node", type=_at_least(1), metavar="N", help="default: what is here, or 8 of --gpu")
    p.add_argument("--measured", type=Path, metavar="FILE", help="rates in place of the table's, as `pretrain doctor` measures them")

    p = add(
        doctor,
        "what a launch here would use, and what would go wrong: alone, as the tasks of srun, or as the ranks of a launcher; status 2 with a problem",
        "srun --ntasks-per-node=1 pretrain doctor configs/gpt2-124m.yaml\n  accelerate launch --multi_gpu --num_processes 2 -m pretrain.cli doctor",
    )
    p.add_argument("config", nargs="?", help="whose folders are measured, and what it would come to (default: folders runs and data here)")
    p.add_argument("overrides", nargs="*", metavar="section.key=value")
    p.add_argument("--wait", type=_at_least(1), default=60, metavar="SECONDS", help="for ranks that do not come (default %(default)s)")

    p = add(inspect, "look into a set of tokens or a run", 'pretrain inspect data/mine --find "fellow citizens"')
    p.add_argument("folder", type=Path, help="a prepared set, a file or folder of other people's token files, or a run folder")
    p.add_argument("--ledger", action="store_true", help="a run: prove that no window was skipped or trained on twice")
    a_set = p.add_argument_group("a set")
    a_set.add_argument("--verify", action="store_true", help="hash every file again, and look at every token")
    a_set.add_argument("--find", metavar="TEXT", help="where this text is")
    a_set.add_argument("--window", type=_at_least(0), metavar="N", help="show window N whole, as training sees it")
    a_set.add_argument("--split", choices=["train", "val"], help="of --find (default: all) and --window (default: train)")
    a_set.add_argument("--sequence-length", type=_at_least(1), default=1024, metavar="T", help="tokens of a window (default %(default)s)")
    a_set.add_argument("--tokenizer", help="of a set that brings none: gpt2, byte, a Hugging Face name or folder")
    a_set.add_argument(
        "--limit", type=_at_least(0), default=10**9, metavar="N", help="look at so many tokens of a split; 0 at all (default 1,000,000,000)"
    )
    a_set.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the lengths of the documents there")
    return parser


def _strategies(text: str) -> list[str]:
    from pretrain.strategies import STRATEGIES

    names = text.split(",") if text else list(STRATEGIES)
    if unknown := [name for name in names if name not in STRATEGIES]:
        raise argparse.ArgumentTypeError(f"unknown strategy {unknown[0]!r}; there are {', '.join(STRATEGIES)}")
    return names


def _part(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and int(parts)):
        raise argparse.ArgumentTypeError(f"expected a part such as 3/8, found {text!r}")
    return int(number), int(parts)


def _counts(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"expected numbers of processes such as 1,2,4; found {text!r}")
    return [int(part) for part in parts]


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a number from {least}; found {text!r}")
        return int(text)

    return number


def _say(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
