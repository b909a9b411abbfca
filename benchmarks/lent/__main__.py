"""The commands of this package: `run`, `report` and `pack`. `python -m benchmarks.lent --help` lists them."""

import argparse
import sys
from pathlib import Path

from benchmarks.lent.report import report
from benchmarks.lent.run import Command, run
from benchmarks.lent.stages import STAGES


def main(arguments: list[str]) -> int:
    """Carries out one command; its exit status."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.action(options))
    except (ValueError, RuntimeError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.lent", description="Measures a GPU that is lent for minutes.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    names = "; ".join(stage.name for stage in STAGES)

    doing = commands.add_parser("run", help="go through the plan, or go on with it", epilog=f"Stages: {names}.")
    doing.add_argument("--seconds", type=float, default=570.0, help="time of this command (570)")
    doing.add_argument("--spent", type=float, default=0.0, help="seconds of these that are over, as run.sh says (0)")
    doing.add_argument("--folder", type=Path, default=Path("runs/lent"), help="figures and logs (runs/lent)")
    doing.add_argument("--copy", type=Path, help="folder that gets figures and logs too, as they come")
    doing.add_argument("--device", default="auto", help="cuda, cpu (smallest sizes) or auto, what is there")
    doing.add_argument("--peer", default=sys.executable, help="Python that has TRL in it (this one)")
    doing.add_argument("--only", type=_names, default=(), metavar="STAGE;STAGE", help="go through these alone")
    doing.add_argument("--again", type=_names, default=(), metavar="STAGE;STAGE", help="try these once more")
    doing.set_defaults(action=_run)

    packing = commands.add_parser("pack", help="write the parts that travel, with wheels from where pip gets them")
    packing.add_argument("out", type=Path, help="a new folder for the parts")
    packing.add_argument("--part-mib", type=int, default=55, help="largest size of a part in MiB (55)")
    packing.add_argument("--image", type=Path, help="packages that the machine has (benchmarks/lent/image.txt)")
    packing.add_argument("--whole", action="store_true", help="pack the wheels as they are: larger, and complete")
    packing.set_defaults(action=_pack)

    telling = commands.add_parser("report", help="show the figures beside those expected")
    telling.add_argument("file", type=Path, help="the figures.jsonl that run writes")
    telling.set_defaults(action=_report)
    return parser


def _names(text: str) -> tuple[str, ...]:
    """Names of stages, separated by semicolons."""
    return tuple(name.strip() for name in text.split(";") if name.strip())


def _run(options: argparse.Namespace) -> int:
    return run(
        Command(
            seconds=options.seconds,
            spent=options.spent,
            folder=options.folder,
            copy=options.copy,
            device=options.device,
            peer=options.peer,
            only=options.only,
            again=options.again,
        )
    )


def _pack(options: argparse.Namespace) -> int:
    from benchmarks.lent.pack import Packing, pack, told  # imports what a bare machine lacks

    given = {"image": options.image} if options.image else {}
    print(told(pack(Packing(options.out, part_mib=options.part_mib, whole=options.whole, **given))))
    return 0


def _report(options: argparse.Namespace) -> int:
    print(report(options.file), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
