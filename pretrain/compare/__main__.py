"""A comparison as an array job, for slurm/compare.sbatch: each task is one launch.

python -m pretrain.compare CONFIG [section.key=value …]                          how many launches there are
python -m pretrain.compare --launch K --processes N CONFIG [section.key=value …]  writes the K-th one's config, from 1, and prints its path; nothing
                                                                                      where it is done
python -m pretrain.compare --ended K CONFIG [section.key=value …]                takes note of it; with the last one, writes the report
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pretrain.compare import planned, report, write_plan
from pretrain.compare.reporting import read
from pretrain.compare.results import UNSETTLED
from pretrain.compare.running import DONE, STOPPED, begin_anew, take_note, title, write_config
from pretrain.config import ConfigError
from pretrain.runfolder import in_use


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pretrain.compare", description="The launches of a comparison, for slurm/compare.sbatch."
    )
    parser.add_argument("--launch", type=int, metavar="K")
    parser.add_argument("--processes", type=int, metavar="N", default=0, help="that the job has")
    parser.add_argument("--ended", type=int, metavar="K")
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    o = parser.parse_args(arguments)
    try:
        cfg, launches = planned(o.config, o.overrides)
        number = o.launch or o.ended
        if number is None:
            print(len(launches))
            return 0
        if not 1 <= number <= len(launches):
            raise ConfigError(f"{o.config} has {len(launches)} launches and no number {number}; write --array=1-{len(launches)}")
        launch = launches[number - 1]
        write_plan(cfg, o.config, o.overrides, launches)
        if o.launch:
            if launch.member.processes != o.processes:
                fitting = ",".join(str(k) for k, one in enumerate(launches, 1) if one.member.processes == o.processes)
                raise ConfigError(
                    f"{launch.member.name} is for {launch.member.processes} process{'es' if launch.member.processes > 1 else ''}, and the job has {o.processes}; ask for as many, or write "
                    f"compare.processes={o.processes}" + (f" (this job fits --array={fitting})" if fitting else "")
                )
            if (launch.folder / DONE).exists():
                print(f"{title(launch, cfg.compare.kind)} is done already", file=sys.stderr)
            elif owner := in_use(launch.folder):
                print(owner, file=sys.stderr)
                return STOPPED  # it may be free in a moment
            else:
                begin_anew(launch, cfg.compare.kind)
                print(write_config(launch))
            return 0
        print(f"{title(launch, cfg.compare.kind)}: {take_note(launch, cfg.compare.kind) or 'no run'}")
        folder = Path(cfg.compare.dir)
        if more := planned(o.config, o.overrides)[1][len(launches) :]:
            print(
                f"of what is best there are {len(more)} launches more: sbatch again with --array={len(launches) + 1}-{len(launches) + len(more)}"
            )
            return 0
        if not any(row.state in UNSETTLED for row in read(folder).rows):
            for file in report([folder], folder / "report"):
                print(file)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
