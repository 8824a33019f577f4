"""From a recipe to a finished run: everything is opened and checked first, then the devices start, then the loop.

A run folder holds recipe.toml (resolved), ds_config.json, environment.json, metrics.jsonl, tensorboard/, checkpoints/,
and, when training is done, model/ (an ordinary Hugging Face folder plus barista.json) and DONE. A run that was asked to
end early leaves STOPPED (JSON: step, reason).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from data.ground.command import end_for
from data.ground.errors import ConfigError, UserError
from data.ground.files import describe_os_error, write_atomically
from data.ground.options import Parser, settings_among
from data.stream import Stream
from models.settings import EmbeddingSettings
from trainer.agreement import check_agreement, frozen_fingerprint
from trainer.build import ModelParts, build_model, build_objective, check_shared_memory, open_shards, open_stream
from trainer.checkpoint import Checkpointer, SavedCheckpoint, Saves
from trainer.config.checks import check_world
from trainer.config.load import as_toml, load_recipe
from trainer.config.read_keys import as_read, is_read
from trainer.config.reference import help_text
from trainer.config.schema import Recipe
from trainer.costs.flops import bf16_slowdown
from trainer.costs.objective_costs import costs_of
from trainer.distributed import Refused, World, gather_objects, start
from trainer.ds_config import (
    checked_ds_config,
    full_ds_config,
    loads_weights,
    multiplies_in_bf16,
    takes_weights_of_rank_0,
)
from trainer.engine import Engine
from trainer.environment import FILE as ENVIRONMENT_FILE
from trainer.environment import Environment
from trainer.evaluation.during_training import Evaluator
from trainer.exporting.model_folder import embedding_settings, save_model
from trainer.loop import Hooks, Plan, RunState, TrainState, train
from trainer.monitoring.dashboard import open_dashboard
from trainer.monitoring.lines import FILE as METRICS_FILE
from trainer.monitoring.metrics import Metrics
from trainer.monitoring.trackers import check_sinks
from trainer.optim import learning_rate
from trainer.replay import check_replay, replay
from trainer.resilience.anomalies import GaveUp
from trainer.resilience.run_lock import Locked, lock
from trainer.resilience.stopping import STOP_FILE_VARIABLE, NotSaved, Stopped, StopRequests
from trainer.resilience.watchdog import DIED_CODE, Watchdog
from trainer.run_folder import check_output_folder, lost_training, no_checkpoint, prove_writable, steps_trained

log = logging.getLogger(__name__)


def main(command: str, description: str, argv: Sequence[str] | None = None) -> None:
    """The body of `trainer.pretrain`, `trainer.finetune` and `trainer.distill`; `command` is the module's name."""
    parser = Parser(
        prog=f"python -m trainer.{command}",
        description=description,
        epilog=help_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, metavar="RECIPE.toml", help="the recipe; see launch/recipes")
    parser.add_argument(
        "--resume",
        choices=("never", "auto", "required"),
        help="never: refuse a folder that holds a run; auto: go on from its newest checkpoint, or start; "
        "required: go on or fail (the same as --run.resume=...)",
    )
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # what the deepspeed launcher passes
    args, rest = parser.parse_known_args(argv)
    overrides = settings_among(rest)
    if args.resume:
        overrides.append(f"run.resume={args.resume}")
    recipe = load_recipe(args.config, overrides)
    if recipe.kind.command != command:
        raise ConfigError(
            f"objective.name = {recipe.objective.name!r} in {args.config} is trained by "
            f"`python -m trainer.{recipe.kind.command}`"
        )
    execute(recipe)


def execute(recipe: Recipe, *, last: bool = True) -> Path:
    """Train what the recipe says; returns the run folder. Every rank calls it.

    last: the process group ends afterwards; False where the ranks have more to do together.

    Raises Stopped, after a checkpoint, where the run was asked to end early, and GaveUp where it cannot go on.
    """
    # transformers' tables of unused keys, such as of an MLM head in fine-tuning, look like errors.
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    check_world(recipe, int(os.environ.get("WORLD_SIZE", "1")))
    if recipe.debug.replay:
        recipe = dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, resume="required"))
    check_output_folder(recipe)
    check_sinks(recipe.log)
    ds_config = checked_ds_config(recipe)
    output = Path(recipe.run.output)
    stop_file = os.environ.get(STOP_FILE_VARIABLE)
    with StopRequests(after_minutes=recipe.train.stop_after_minutes, stop_file=stop_file) as stops:
        step, reason = _run(recipe, ds_config, output, stops)
    try:
        dist.barrier()
        if last:
            dist.destroy_process_group()
    except RuntimeError as error:
        log.warning("all is written, but another rank was gone before the end (%s)", str(error).splitlines()[0])
    if reason is not None:
        raise Stopped(f"stopped after step {step} ({reason}); go on with --resume auto")
    return output


def _run(written: Recipe, ds_config: Mapping[str, Any], output: Path, stops: StopRequests) -> tuple[int, str | None]:
    """(The last step taken, why the run stopped before its end or None). With debug.replay no step is taken.

    written: the recipe for the run folder. All else takes it as it is read, so nothing below asks which keys are.
    """
    recipe = as_read(written)
    sources = open_shards(recipe)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    stream = open_stream(recipe, sources, rank=rank, world_size=world_size)
    check_replay(recipe, _total_steps(recipe, stream))
    parts = build_model(recipe, sources, ds_config, weights=loads_weights(recipe, ds_config, rank))
    settings = embedding_settings(recipe, sources)
    evaluator = Evaluator.of(recipe, settings)
    check_shared_memory(recipe.data.num_workers)
    if rank == 0 and not recipe.debug.replay:
        prove_writable(output)
    world = start()
    with ExitStack() as stack:
        stack.callback(stream.close)
        watchdog = stack.enter_context(Watchdog(world, hang_seconds=recipe.train.hang_seconds))
        try:
            check_agreement(recipe, ds_config, sources, parts, world)
            if world.is_main and world.size > 1 and takes_weights_of_rank_0(recipe, ds_config):
                log.info("every rank takes its share of the weights from rank 0, where they have been checked")
            if recipe.debug.replay:
                replay(recipe, parts, stream, world, heartbeat=watchdog.heartbeat)
                return 0, None
            # The ranks' weights are equal, and at stage 3 only rank 0 has them.
            frozen = gather_objects(frozen_fingerprint(parts.module) if world.is_main else "")[0]
            _claim(recipe, world, stack)
            write_run_folder(written, ds_config, world)
            engine = Engine(parts.module, recipe, world, ds_config)
            engine.heartbeat = watchdog.heartbeat
            if world.is_main:
                _say_if_slow(engine)
                _say_exchange(recipe, world)
            return _train(
                recipe, engine, parts, stream, evaluator, settings, frozen=frozen, stops=stops, watchdog=watchdog
            )
        except (GaveUp, NotSaved, Refused):  # raised on all ranks
            raise
        except Exception as error:
            end = end_for(error)
            watchdog.report(error, DIED_CODE if end is None else end.exit_code)
            raise


def _total_steps(recipe: Recipe, stream: Stream) -> int:
    return recipe.train.steps or stream.num_steps


def _say_exchange(recipe: Recipe, world: World) -> None:
    """How ranks compare their queries with other ranks' passages."""
    if world.size == 1 or not is_read(recipe, "train.negatives_exchange"):
        return
    ring = costs_of(recipe).exchange == "ring"
    way = "visit all ranks in a ring, so that none holds them all" if ring else "are gathered on every rank"
    log.info("train.negatives_exchange = %r: passages %s", recipe.train.negatives_exchange, way)


def _train(
    recipe: Recipe,
    engine: Engine,
    parts: ModelParts,
    stream: Stream,
    evaluator: Evaluator,
    settings: EmbeddingSettings,
    *,
    frozen: str,
    stops: StopRequests,
    watchdog: Watchdog,
) -> tuple[int, str | None]:
    output, world = Path(recipe.run.output), engine.world
    total_steps = _total_steps(recipe, stream)
    checkpointer = Checkpointer(
        output / "checkpoints",
        keep=recipe.checkpoint.keep,
        keep_every_steps=recipe.checkpoint.keep_every_steps,
        state=RunState,
        frozen=frozen,
    )
    state = _resumed(recipe, checkpointer, engine, stream, total_steps=total_steps)
    if world.is_main:
        (output / "STOPPED").unlink(missing_ok=True)
    plan = _plan(recipe, total_steps, evaluates=evaluator.has_tasks)
    metrics = Metrics(
        output,
        world,
        every_steps=recipe.log.every_steps,
        total_steps=total_steps,
        start_step=state.step,
        dashboard=open_dashboard(recipe, start_step=state.step) if world.is_main else None,
        samples=recipe.log.samples,
        repeats_evaluation=plan.evaluates_at(state.step) or (evaluator.has_tasks and state.step == total_steps),
    )
    evaluate = functools.partial(evaluator.run, engine, parts.tokenizer, world)

    def report(step: int, saved: SavedCheckpoint) -> None:
        metrics.checkpoint(step, seconds=saved.seconds, still_seconds=saved.still_seconds, mib=saved.mib)

    saves = Saves(
        checkpointer,
        engine,
        state_of=lambda: state.state_dict() | {"stream": stream.state_dict()},
        overlap=recipe.checkpoint.overlap,
        report=report,
    )
    if world.is_main:
        _say_if_all_warm_up(plan)
    try:
        reason = train(
            engine,
            build_objective(recipe, parts),
            stream,
            state,
            plan=plan,
            metrics=metrics,
            hooks=Hooks(saves, evaluate, stops.wanted, watchdog.heartbeat),
        )
        watchdog.heartbeat("end of the run", patient=True)
        metrics.flush(state.step)
        if state.step == total_steps:
            reason = None
            if evaluator.has_tasks and not plan.evaluates_at(total_steps):
                metrics.evaluation(state.step, evaluate())
            save_model(engine, parts, recipe, settings)
        else:
            _end_early(output, state.step, reason, saved=not saves.failed, world=world)
    finally:
        metrics.close()
    return state.step, reason


def _end_early(output: Path, step: int, reason: str | None, *, saved: bool, world: World) -> None:
    """Write STOPPED for a run that was asked to end. All ranks call it.

    reason: None where the recipe ends this process here. saved: whether the step has a checkpoint. Raises NotSaved
    where it has none, and where STOPPED cannot be written, by which a job decides: without it, exit code 75 would say
    that nothing is left to do. A job counts NotSaved as a crash and starts again, from this checkpoint, a few times.
    """
    if not saved:
        raise NotSaved(
            f"stopped after step {step} ({reason or 'train.stop_at_step'}), whose checkpoint could not be saved in "
            f"{output}/checkpoints; fix what the warning above says, then go on with --resume auto"
        )
    problem = None
    if reason is not None and world.is_main:
        try:
            write_atomically(output / "STOPPED", json.dumps({"step": step, "reason": reason}) + "\n")
        except OSError as error:
            problem = (
                f"stopped after step {step} ({reason}) with a checkpoint, and {output}/STOPPED cannot be written "
                f"({error.strerror}); free some space there, and go on with --resume auto"
            )
    if (problem := gather_objects(problem)[0]) is not None:
        raise NotSaved(problem)


def _resumed(
    recipe: Recipe, checkpointer: Checkpointer, engine: Engine, stream: Stream, *, total_steps: int
) -> TrainState:
    """How far the run is, with engine and stream put there: at the newest checkpoint, or at the beginning."""
    state, output = TrainState(), Path(recipe.run.output)
    if recipe.run.resume != "never" and (saved := checkpointer.load_newest(engine)) is not None:
        if saved["step"] > total_steps:
            raise Refused(
                f"{checkpointer.folder} holds a checkpoint of step {saved['step']}, and this run has {total_steps} "
                "steps; it is another run's: move it away"
            )
        state.load_state_dict(saved)
        stream.load_state_dict(saved["stream"])
        log.info("going on at step %d of %d", state.step, total_steps)
    elif recipe.run.resume == "required":
        raise Refused(no_checkpoint(output))
    elif recipe.run.resume == "auto":
        _start_over(output, engine.world)
    return state


def _start_over(output: Path, world: World) -> None:
    """Start from the beginning, with a warning if steps were trained. Raises Refused if checkpoints were saved."""
    lost = gather_objects(lost_training(output) if world.is_main else None)[0]
    if lost is not None:
        raise Refused(lost)
    if world.is_main and (steps := steps_trained(output / METRICS_FILE)):
        log.warning(
            "%s has come to step %d without saving a checkpoint; it starts over from the beginning", output, steps
        )


def _plan(recipe: Recipe, total_steps: int, *, evaluates: bool) -> Plan:
    optim = recipe.optim
    return Plan(
        seed=recipe.run.seed,
        total_steps=total_steps,
        stop_at_step=recipe.train.stop_at_step or total_steps,
        learning_rate=functools.partial(
            learning_rate,
            peak=optim.lr,
            total_steps=total_steps,
            warmup_ratio=optim.warmup_ratio,
            schedule=optim.schedule,
        ),
        save_every_steps=recipe.checkpoint.every_steps,
        evaluate_every_steps=recipe.evaluation.every_steps if evaluates else 0,
        max_skipped_steps=recipe.train.max_skipped_steps,
        spike_deviations=recipe.log.spike_deviations,
    )


def _claim(recipe: Recipe, world: World, stack: ExitStack) -> None:
    """Hold the run folder against other starts until `stack` closes; all ranks call it.

    The folder is checked once more when it is held, because another start may have filled it since the first check.
    """
    output, problem = Path(recipe.run.output), None
    # The folder may change only after all ranks have checked it, and joining the process group may not wait for all.
    dist.barrier()
    if world.is_main:
        try:
            output.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock(output))
            check_output_folder(recipe)
        except (Locked, UserError) as error:
            problem = str(error)
        except OSError as error:
            problem = describe_os_error(error) or f"run.output {output} cannot be used ({error}); name another folder"
    if (problem := gather_objects(problem)[0]) is not None:
        raise Refused(problem)


def _say_if_all_warm_up(plan: Plan) -> None:
    if plan.total_steps == 1 and plan.learning_rate(0) == 0:
        log.warning(
            "the run's one step is the first of a warm-up, whose learning rate is 0, so nothing is trained; set "
            "optim.warmup_ratio = 0"
        )


def _say_if_slow(engine: Engine) -> None:
    if multiplies_in_bf16(engine.ds_config) and (slowdown := bf16_slowdown(engine.device)) > 2:
        log.warning(
            "this device takes %.0f times as long for bf16 products as for float32; "
            "--engine.ds_config=ds_configs/zero1_float32.json is faster here",
            slowdown,
        )


def write_run_folder(recipe: Recipe, ds_config: Mapping[str, Any], world: World) -> None:
    """Write what the run is, for people and for a resume. DONE and STOPPED stay until there is something newer."""
    output, problem = Path(recipe.run.output), None
    if world.is_main:
        files = {
            "recipe.toml": as_toml(recipe),
            ENVIRONMENT_FILE: Environment.of(world).model_dump_json(indent=2) + "\n",
            "ds_config.json": json.dumps(full_ds_config(recipe, ds_config), indent=2) + "\n",
        }
        new = [name for name in files if not (output / name).exists()]
        try:
            for name, content in files.items():
                write_atomically(output / name, content)
        except OSError as error:
            problem = (
                f"{output} cannot be written ({error.strerror}); free some space there, or name another run.output"
            )
            for name in new:
                (output / name).unlink(missing_ok=True)
    if (problem := gather_objects(problem)[0]) is not None:
        raise Refused(problem)
