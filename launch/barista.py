"""The console script `barista`: every command under one name; each is a module that `python -m` runs as well."""

from __future__ import annotations

import runpy
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from data.ground.command import USER_ERROR_CODE, tell
from data.ground.errors import ConfigError


@dataclass(frozen=True)
class Command:
    module: str
    help: str


# Commands by the stage of the work, in the order in which a newcomer needs them.
GROUPS: Mapping[str, Mapping[str, Command]] = {
    "start": {
        "demo": Command("launch.demo", "all steps from data to exported models on a laptop, in minutes"),
        "doctor": Command("launch.doctor", "checks whether this machine, or every rank of a job, can train"),
        "qualify": Command("launch.qualify", "all that only a GPU can show, as a page with a verdict a line"),
    },
    "data": {
        "prepare": Command("data.prepare", "texts and training examples to tokenized shards; also trains a tokenizer"),
        "excerpts": Command("data.excerpts", "documents to short texts, such as embedding models usually get"),
        "mine": Command("trainer.mine_negatives", "hard negatives for pairs, found by a trained model"),
    },
    "train": {
        "resize": Command("trainer.resize", "an existing model at every size, from texts without labels"),
        "pretrain": Command("trainer.pretrain", "masked pre-training of all sizes at once (SMAE)"),
        "finetune": Command("trainer.finetune", "contrastive fine-tuning of all sizes at once (SRL)"),
        "distill": Command("trainer.distill", "a frozen teacher's vectors into every size at once"),
        "teacher-vectors": Command("trainer.teacher_vectors", "a teacher's vectors of all texts, computed once"),
        "static-init": Command("trainer.static_init", "a token table to start a static embedding from"),
        "select-seed": Command("trainer.select_seed", "starts several seeds, trains the best one to the end"),
        "soup": Command("trainer.soup", "the mean of several models' weights"),
    },
    "use": {
        "evaluate": Command("trainer.evaluate", "scores at every size, comparisons, latency, reranking"),
        "export": Command("trainer.export", "a sentence-transformers folder for each size, and ONNX files"),
        "study": Command("trainer.study", "models × methods × seeds, trained, evaluated and reported"),
    },
    "cluster": {
        "plan": Command("launch.plan", "predicts time, memory and bytes of a training on other machines"),
        "submit": Command("launch.submit", "submits a recipe, or a chain of jobs, to Slurm"),
        "status": Command("launch.status", "shows the progress of runs"),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


def overview() -> str:
    """The list of all commands, which `barista --help` prints."""
    lines = ["usage: barista COMMAND …     (barista COMMAND --help explains one)", ""]
    for group, commands in GROUPS.items():
        lines.append(f"{group}:")
        lines += [f"  {name:<16} {command.help}" for name, command in commands.items()]
        lines.append("")
    lines += textwrap.wrap(
        "Each is a module as well: `python -m trainer.finetune` is `barista finetune`. Training on several GPUs is "
        "started by the launcher: `deepspeed --module trainer.finetune --config RECIPE.toml`.",
        width=100,
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command in this process, as `python -m` would; returns an exit code if there is no such command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return 0 if arguments else USER_ERROR_CODE
    name, *rest = arguments
    if name not in COMMANDS:
        return tell(ConfigError(f"barista has no command {name[:40]!r}; `barista --help` lists them"))
    sys.argv = [f"barista {name}", *rest]
    runpy.run_module(COMMANDS[name].module, run_name="__main__", alter_sys=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
