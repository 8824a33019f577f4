"""Command: backbones × methods × seeds, trained, evaluated and reported, from one file.

    python -m trainer.study STUDY.toml                  go on where it stopped; at the end <output>/report
    python -m trainer.study STUDY.toml --jobs 2         two runs at a time
    python -m trainer.study STUDY.toml --arms mlm/srl   these arms first; the report says what is missing
    python -m trainer.study STUDY.toml --list           the runs and which are done
    python -m trainer.study STUDY.toml --report-only    the report again, from the raw results alone

Each run is the command that a user would type, in a process of its own: `trainer.pretrain`, `trainer.distill` or
`trainer.finetune` (under the deepspeed launcher where the study has more than one rank), then `trainer.evaluate`. A
method without a recipe is only evaluated. Finished work (<run>/DONE, and an evaluation of the same weights and tests by
the same command) is skipped; a finished run whose recipe is no longer the study's is refused. Checkpoints of finished
runs are removed. Output goes to <output>/logs. SIGTERM, SIGUSR1, Ctrl-C, the file that BARISTA_STOP_FILE names, or
--stop-after-minutes lets the runs in progress save and ends with code 75; the same command goes on.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

import torch

from data.ground.command import run_command
from data.ground.errors import ConfigError
from data.ground.options import Parser, Stated, flag_of, real, stated_in
from trainer.experiments.checks import check_files, check_given
from trainer.experiments.jobs import Work
from trainer.experiments.plan import Result, Run, Study, load_study
from trainer.experiments.report import write_report
from trainer.experiments.study_jobs import chosen, has_results, is_done, is_evaluated, jobs_of

log = logging.getLogger(__name__)

# The options that start nothing, the strongest first, and what is not read with each of them.
_NOT_READ_WITH = {
    "report_only": ("list", "arms", "jobs", "stop_after_minutes"),
    "list": ("jobs", "stop_after_minutes"),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="python -m trainer.study", description="Train, evaluate and report a study.")
    parser.add_argument("study", metavar="STUDY.toml", help="see launch/studies and docs/evaluation.md")
    parser.add_argument(
        "--report-only", action="store_true", help="make the report from the raw results that are there"
    )
    parser.add_argument("--list", action="store_true", help="list the runs and whether they are done; starts nothing")
    parser.add_argument(
        "--stop-after-minutes",
        action=Stated,
        type=real(least=0),
        metavar="M",
        default=0.0,
        help="let the run in progress save, exit with 75",
    )
    parser.add_argument(
        "--jobs",
        action=Stated,
        type=int,
        default=1,
        metavar="N",
        help="runs at a time, sharing the cores or GPUs (%(default)s)",
    )
    parser.add_argument("--arms", nargs="+", metavar="B/M", help="only these arms for now, and what they start from")
    args = parser.parse_args(argv)
    _refuse_unread(args)
    if args.jobs < 1:
        raise ConfigError(f"--jobs {args.jobs} is below 1, one run at a time")
    study = load_study(args.study)
    if args.report_only:
        sys.stdout.write(f"{write_report(study)}\n")
        return
    # All recipes are resolved and all evaluation files read before anything starts.
    runs, results = chosen(study, args.arms)
    if args.list:
        _list(study, runs, results)
        return
    check_files(study, runs)
    check_given(study, runs, results)
    work = Work(study.output, args.stop_after_minutes, args.jobs, _gpus(args.jobs, study.ranks))
    jobs = jobs_of(study, runs, results, work)
    log.info("%s: %d runs, %d evaluations, %d left to do", study.name, len(runs), len(results), len(jobs))
    with work.listening():
        work.carry_out(jobs)
    sys.stdout.write(f"{write_report(study)}\n")


def _refuse_unread(args: argparse.Namespace) -> None:
    stated = {*stated_in(args), *(name for name in ("list", "arms") if getattr(args, name))}
    for stronger, unread in _NOT_READ_WITH.items():
        for name in unread if getattr(args, stronger) else ():
            if name in stated:
                raise ConfigError(f"{flag_of(name)} is not read with {flag_of(stronger)}; leave one of the two out")


def _gpus(jobs: int, ranks: int) -> list[str]:
    """The GPUs to share out, as CUDA_VISIBLE_DEVICES names them; none on a machine of cores alone."""
    count = torch.cuda.device_count()
    if count and jobs > 1 and jobs * ranks > count:
        raise ConfigError(f"--jobs {jobs} of {ranks} ranks need {jobs * ranks} GPUs, there are {count}; lower --jobs")
    return (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")[:count]


def _list(study: Study, runs: Sequence[Run], results: Sequence[Result]) -> None:
    """Write a line for each run and its evaluation, then one for each evaluation without a run of its own."""
    own = {result.name: result for result in results}
    for run in runs:
        state = "done" if is_done(run) else "stopped" if (run.folder / "STOPPED").is_file() else "to do"
        result = own.pop(run.name.removeprefix("runs/"), None)
        if result is not None and is_done(run):
            state += f", {_evaluated(study, result, absent='not evaluated')}"
        sys.stdout.write(f"{run.name}\t{state}\n")
    for result in own.values():
        sys.stdout.write(f"results/{result.name}\t{_evaluated(study, result, absent='to do')}\n")


def _evaluated(study: Study, result: Result, *, absent: str) -> str:
    """Whether a result is there, and of this model, these tests and this command."""
    if is_evaluated(study, result):
        return "evaluated"
    return "to be evaluated again" if has_results(result) else absent


if __name__ == "__main__":
    run_command(main)
