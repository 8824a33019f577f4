"""Command: start a recipe from several seeds, and train the seed that is best on a development set to the end.

    python -m trainer.select_seed RECIPE.toml --seeds 1 2 3 --share 0.1 --sts stsb_dev.tsv --output runs/x

Each seed trains up to the same step, `--share` of all, on the schedule of the whole run, and is evaluated there at
every size of the ladder; the one with the highest mean of Spearman (STS) and nDCG@10 (BEIR folders) then trains to its
end, from its checkpoint. The result is the run that its seed alone would have given. A set used for this choice is no
test set any more.

<output>/selection.json holds every seed's scores, the chosen seed and the reason. <output>/seed_S are ordinary runs; at
the end, the checkpoints of the other seeds are removed. Each run is the command that a user would type. SIGTERM,
SIGUSR1, Ctrl-C, the file that BARISTA_STOP_FILE names, or --stop-after-minutes lets the run in progress save and ends
with code 75; the same command goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from data.ground.command import run_command
from data.ground.options import Parser, real
from trainer.experiments.jobs import Work
from trainer.experiments.selection import carry_out, make_plan, selection_text


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(
        prog="python -m trainer.select_seed",
        description="Train several seeds a part of the way, and the best on a development set to the end. Settings of "
        "the recipe are given as --section.key=value.",
    )
    add = parser.add_argument
    add("recipe", metavar="RECIPE.toml")
    add("--seeds", type=int, nargs="+", required=True, metavar="N", help="two or more")
    add("--share", type=float, default=0.1, help="of the steps, before the comparison (%(default)s)")
    add("--sts", nargs="+", default=[], metavar="FILE", help="development sets; none here: the recipe's [evaluation]")
    add("--beir", nargs="+", default=[], metavar="FOLDER")
    add("--split", default="", help="of the BEIR folders (the recipe's)")
    add("--output", required=True, metavar="FOLDER", help="where the runs go")
    add("--ranks", type=int, default=1, help="processes a run, under the deepspeed launcher if more than 1")
    add("--stop-after-minutes", type=real(least=0), default=0.0, metavar="M", help="let the run save, exit with 75")
    args, settings = parser.parse_known_args(argv)
    plan = make_plan(args, settings)
    with Work(plan.output, args.stop_after_minutes).listening() as work:
        found = carry_out(plan, work)
    sys.stdout.write(selection_text(found))


if __name__ == "__main__":
    run_command(main)
