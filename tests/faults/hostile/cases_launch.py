"""launch.submit, status, node, doctor and plan: odd names, damaged run folders, environments, secrets."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w

from tests import ROOT
from tests.faults.hostile.assets import Assets
from tests.faults.hostile.builders import deep, export, ran, recipe_values, serve, train, write
from tests.faults.hostile.case import Command, Row, case, family, row
from tests.faults.hostile.verdict import Outcome, check, done, done_and_said, either, misused, refused

SECRET = "ownKeyOfTheJob"
# A stand-in for Slurm, which runs its script up to the line where training would begin.
SBATCH = """#!/bin/bash
for last; do :; done
sed '/^run=/,$d' "$last" > head.sbatch
bash head.sbatch > /dev/null 2>&1
rm head.sbatch
echo 4242
"""


def slurm(folder: Path, command: Command, *, squeue: str = "exit 1") -> Command:
    """The command, with stand-ins for Slurm's commands on its PATH."""
    for name, text in {"sbatch": SBATCH, "squeue": f"#!/bin/sh\n{squeue}\n", "scancel": "#!/bin/sh\n"}.items():
        write(folder / "bin" / name, text).chmod(0o755)
    return command.but(environment={**command.environment, "PATH": f"{folder / 'bin'}:/usr/bin:/bin"})


def submit(
    folder: Path, assets: Assets, *options: str, output: str = "runs/run", dry_run: bool = True, shards: str = ""
) -> Command:
    """A submission of a tiny recipe, by default with --dry-run."""
    values = recipe_values(shards or assets.documents, run={"output": output})
    write(folder / "r.toml", tomli_w.dumps(values))
    words = ("r.toml", "--gpus-per-node", "0", "--time", "1:00:00", *options, *(("--dry-run",) if dry_run else ()))
    return Command("launch.submit", words, outputs=() if dry_run else ("runs",))


NOTHING_RAN = check(
    "nothing of a name was run", lambda outcome: not any(Path(path).name == "PWNED" for path in outcome.new)
)
NO_ESCAPES = check(
    "no control signs on the terminal",
    lambda outcome: not any(sign in outcome.first.out + outcome.first.err for sign in "\x1b\x07\u202e"),
)


@family(
    "launch/submit-output",
    [
        row("with-a-quote", "runs/a'b"),
        row("with-double-quotes", 'runs/a"b'),
        row("with-a-backslash", "runs/a\\b"),
        row("with-a-newline", "runs/a\ntouch PWNED\n"),
        row("with-a-carriage-return", "runs/a\rb"),
        row("with-an-escape-code", "runs/a\x1b[2J"),
        row("with-a-percent-sign", "runs/%j"),
        row("with-a-nul", "runs/a\0b", cause=26),
        row("with-a-line-separator", "runs/a\u2028b"),
        row("of-300-letters", "runs/" + "x" * 300, cause=25),
        row("of-150-letters-of-two-bytes", "runs/" + "\u00e9" * 150, cause=25),
        row("begins-with-a-hyphen", "--wrap=x", cause=26),
        row("is-a-hyphen", "-", cause=26),
        row("above", ".."),
        row("here", "."),
        row("root", "/"),
        row("a-file", "r.toml"),
    ],
    refused("run.output"),
    NOTHING_RAN,
    NO_ESCAPES,
)
def _(folder: Path, assets: Assets, output: str) -> Command:
    return submit(folder, assets, output=output)


@family(
    "launch/submit-runs-nothing-of",
    [
        row("output-with-a-command", "--run.output=runs/a$(touch PWNED)b"),
        row("output-with-backticks", "--run.output=runs/`touch PWNED`;touch PWNED;"),
        row("output-with-spaces-and-ampersands", "--run.output=runs/a b & touch PWNED|c"),
        row("env-with-a-command", "--env=A=$(touch PWNED)", cause=15),
        row("env-with-a-quote", "--env=A=';touch PWNED;'", cause=15),
        row("env-with-a-backslash", "--env=A=\\';touch PWNED;\\'", cause=15),
        row("module", "--module=a&touch"),
        row("partition", "--partition=a&b|c"),
        row("constraint", "--constraint=a&b|c"),
    ],
    done(),
    NOTHING_RAN,
)
def _(folder: Path, assets: Assets, option: str) -> Command:
    return slurm(folder, submit(folder, assets, option, dry_run=False))


@family(
    "launch/submit-working-folder",
    [
        row("with-a-newline", b"a\ntouch PWNED\nb", expect=(refused("working folder"), NOTHING_RAN)),
        row("with-an-escape-code", b"a\x1b[2J", expect=(refused("working folder"), NO_ESCAPES)),
        row("not-utf8", b"a\xff", expect=refused("working folder")),
        row("with-quotes", b"a'$(touch PWNED)'b %j", expect=(done(), NOTHING_RAN)),
    ],
    cause=26,
)
def _(folder: Path, assets: Assets, name: bytes) -> Command:
    place = folder / os.fsdecode(name)
    place.mkdir()
    submit(place, assets)
    words = ("r.toml", "--gpus-per-node", "0", "--dry-run")
    program = ("/usr/bin/env", "-C", str(place), sys.executable, "-m", "launch.submit", *words)
    return Command("", program, environment={"PYTHONPATH": str(ROOT)})


@family(
    "launch/submit-sbatch",
    [
        row("short-nodes", "-N4", quick=True),
        row("short-array", "-a0-3"),
        row("short-flag-before-nodes", "-HN4"),
        row("short-nodes-and-a-space", "-N 4"),
        row("long-nodes", "--nodes=4", cause="own"),
        row("beginning-of-array", "--arr=0-3", cause="own"),
        row("beginning-of-chdir", "--chd=/", cause="own"),
        row("two-options", "--exclusive --nodes=4", cause="own"),
        row("two-lines", "--exclusive\n#SBATCH --nodes=4", cause="own"),
        row("open-quote", "--comment='a", cause="own"),
        row("no-option", "exclusive", cause="own"),
        row("empty", " ", cause="own"),
        row("a-sound-one", "--comment=a\u00b2", expect=done(), cause="own"),
    ],
    refused("--sbatch"),
    cause=26,
)
def _(folder: Path, assets: Assets, option: str) -> Command:
    return submit(folder, assets, f"--sbatch={option}")


def option(name: str, word: str, *, naming: str) -> Row:
    return row(name, word, expect=(refused(naming), NOTHING_RAN))


@family(
    "launch/submit-option",
    [
        option("container-with-an-open-quote", "--container=sing 'b.sif", naming="--container"),
        option("container-of-two-lines", "--container=a\nb", naming="--container"),
        option("setup-that-bash-cannot-read", "--setup=if true", naming="--setup"),
        option("setup-of-two-lines", "--setup=a\nb", naming="--setup"),
        option("time-of-11-million-years", "--time=99999999999:00:00", naming="--time"),
        option("time-of-many-years", "--time=99999999:00:00", naming="--time"),
        option("time-of-5000-digits", "--time=" + "9" * 5000, naming="--time"),
        option("time-of-other-digits", "--time=\u0663:00:00", naming="--time"),
        option("time-zero", "--time=0", naming="--time"),
        option("after-a-command", "--after=1;touch PWNED", naming="--after"),
        option("after-a-raised-two", "--after=\u00b2", naming="--after"),
        option("after-of-5000-digits", "--after=" + "9" * 5000, naming="--after"),
        option("nodes-beyond-the-batch", "--nodes=1" + "0" * 9, naming="train.global_batch_size"),
        option("signal-beyond-slurms-numbers", "--signal-seconds=1" + "0" * 20, naming="--signal-seconds"),
        option("venv-that-is-not-there", "--venv=no such", naming="--venv"),
        option("mem-of-other-digits", "--mem=\u0663G", naming="--mem"),
        option("output-not-utf8", os.fsdecode(b"--run.output=runs/\xff"), naming="UTF-8"),
        option("recipe-not-toml", "--chain=r.toml", naming="--chain"),
        option("env-without-a-name", f"--env==s3{SECRET}", naming="--env"),
        option("env-without-an-equals-sign", f"--env={SECRET} x", naming="--env"),
        option("env-of-two-lines", f"--env=A={SECRET}\nexport B=1", naming="--env"),
        option("env-that-is-not-set", "--env=NO_SUCH_VARIABLE", naming="NO_SUCH_VARIABLE"),
        option("misspelt-env", f"--envs=A={SECRET}", naming="--envs"),
    ],
    cause=26,
    secrets=(SECRET,),
)
def _(folder: Path, assets: Assets, word: str) -> Command:
    return submit(folder, assets, word)


def earlier(folder: Path, record: str) -> None:
    write(folder / "runs" / "run" / "recipe.toml", "")
    write(folder / "runs" / "run" / "job" / "001" / "environment.json", record)


@family(
    "launch/submit-after-a-record",
    [
        row("cut", '{"job": "4', expect=refused("job/001/environment.json")),
        row("a-list", "[]", expect=refused("job/001/environment.json")),
        row("deep", deep(), expect=refused("job/001/environment.json")),
        row("not-utf8", '"\xff"', expect=refused("job/001/environment.json")),
        row("with-a-number-as-job", '{"job": 4}', expect=refused("job/001/environment.json")),
        row("with-a-list-as-job", '{"job": ["4"]}', expect=refused("job/001/environment.json")),
        row("with-an-option-as-job", '{"job": "--help"}', expect=refused("job/001/environment.json")),
        row("with-other-digits-as-job", '{"job": "\u0664"}', expect=refused("job/001/environment.json")),
        row("of-a-job-in-the-queue", '{"job": "4"}', expect=refused("job 4")),
        row("without-a-job", "{}", expect=done()),
    ],
    cause=25,
)
def _(folder: Path, assets: Assets, record: str) -> Command:
    earlier(folder, record)
    return slurm(folder, submit(folder, assets, dry_run=False), squeue="echo 4 run")


# -------------------------------------------------------------------------------------------------------------- secrets


@family(
    "launch/submit-with-a-secret-in",
    [
        row("env", ("--env", f"WANDB_API_KEY={SECRET}"), quick=True),
        row("env-and-an-equals-sign", (f"--env=WANDB_API_KEY={SECRET}",)),
        row("env-from-here", ("--env", "KEY_OF_MINE")),
        row("env-with-a-quote", (f"--env=A=it's {SECRET} = x",)),
    ],
    done(),
    check("the job's folder is its owner's", lambda outcome: private(outcome, "runs/run/job/001")),
    check("the script reads the variable", lambda outcome: holds(outcome, "runs/run/job/001/variables.sh", SECRET)),
    secrets=(SECRET,),
    cause=15,
)
def _(folder: Path, assets: Assets, words: tuple[str, ...]) -> Command:
    """Submit through stand-ins for Slurm; the secret must be in no file that others can read."""
    return slurm(folder, submit(folder, assets, *words, dry_run=False).but(environment={"KEY_OF_MINE": SECRET}))


@case("launch/submit-changes-that-hold-a-secret", done(), secrets=(SECRET,), cause=15)
def _(folder: Path, assets: Assets) -> Command:
    ran(Command("", ("/usr/bin/git", "init", "-q")))
    write(folder / "notes.txt", "nothing")
    ran(Command("", ("/usr/bin/git", "add", "notes.txt")))
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    ran(Command("", ("/usr/bin/git", *author, "commit", "-qm", "a")))
    write(folder / "notes.txt", f"{SECRET} \xff".encode("latin-1")).chmod(0o600)
    return slurm(folder, submit(folder, assets, dry_run=False))


@family(
    "launch/submit-address",
    [
        row("with-a-password", f"http://user:{SECRET}@host/a", expect=refused("http://***@host/a", "BARISTA_")),
        row("with-a-token", f"http://host/a?token={SECRET}", expect=refused("http://host/a?token=***")),
        row("with-a-variable", "http://user:${BARISTA_KEY}@host/a", expect=refused("--env BARISTA_KEY")),
    ],
    secrets=(SECRET,),
    cause=15,
)
def _(folder: Path, assets: Assets, address: str) -> Command:
    return submit(folder, assets, shards=address).but(environment={"BARISTA_KEY": SECRET})


def private(outcome: Outcome, folder: str) -> str | None:
    """The name and mode of a file in the folder that others may read; None if there is none."""
    for path in (outcome.folder / folder).iterdir():
        if path.is_file() and stat.S_IMODE(path.stat().st_mode) != 0o600:
            return f"{path.name} is of mode {stat.S_IMODE(path.stat().st_mode):o}"
    return None


def holds(outcome: Outcome, path: str, text: str) -> bool:
    return text in (outcome.folder / path).read_text()


def address_of(folder: Path, assets: Assets) -> str:
    return serve(assets.documents).replace("://", f"://user:{SECRET}@")


@family(
    "launch/run-with-a-password",
    [
        row("written-out", False, expect=done()),
        row(
            "named", True, expect=(done(), check("named", lambda outcome: holds(outcome, "run/recipe.toml", "${BARI")))
        ),
    ],
    secrets=(SECRET,),
    cause=15,
)
def _(folder: Path, assets: Assets, named: bool) -> Command:
    """The run trains, is exported and goes on; the password is in no file and in no printed line."""
    address = address_of(folder, assets)
    environment = {"BARISTA_KEY": SECRET}
    values = recipe_values(address.replace(SECRET, "${BARISTA_KEY}") if named else address)
    first = train(folder, values, "--train.stop_at_step=4").but(environment=environment)
    (folder / "recipe.toml").chmod(0o600)
    ran(first)
    ran(train(folder, values, "--resume", "auto").but(environment=environment))
    (folder / "recipe.toml").chmod(0o600)
    return export("run/model")


@family(
    "launch/address-that-cannot-be-read",
    [
        row("with-a-password", "http://user:{}@127.0.0.1:9/a", expect=refused("http://***@127.0.0.1:9/a")),
        row("with-a-token", "http://127.0.0.1:9/?token={}", expect=refused("token=***")),
        row(
            "with-a-variable-that-is-not-set",
            "http://user:${{BARISTA_NONE}}@127.0.0.1:9/a",
            expect=refused("BARISTA_NONE"),
        ),
        row(
            "with-somebody-elses-variable", "http://user:${{KEY_OF_MINE}}@127.0.0.1:9/a", expect=refused("KEY_OF_MINE")
        ),
        row("with-a-variable-as-host", "http://${{BARISTA_KEY}}/a", expect=refused("nothing is hidden")),
        row("that-a-run-has-hidden", "http://***@127.0.0.1:9/a", expect=refused("a secret is hidden")),
    ],
    secrets=(SECRET,),
    cause=15,
)
def _(folder: Path, assets: Assets, address: str) -> Command:
    environment = {"BARISTA_KEY": SECRET, "KEY_OF_MINE": SECRET}
    command = train(folder, recipe_values(address.format(SECRET))).but(environment=environment)
    (folder / "recipe.toml").chmod(0o600)
    return command


# --------------------------------------------------------------------------------------------------------------- status


def metrics(text: str) -> Callable[[Path], object]:
    return lambda run: write(run / "metrics.jsonl", text + "\n")


def recipe(old: str, new: str) -> Callable[[Path], object]:
    def change(run: Path) -> None:
        text = (run / "recipe.toml").read_text()
        assert re.search(old, text), old
        (run / "recipe.toml").write_text(re.sub(old, new, text))

    return change


def stopped(text: str) -> Callable[[Path], object]:
    return lambda run: write(run / "STOPPED", text)


SAID_DAMAGED = done_and_said("damaged")


@family(
    "launch/status",
    [
        row("good", lambda run: None, expect=done()),
        row("metrics-deep", metrics(deep())),
        row("metrics-not-utf8", lambda run: write(run / "metrics.jsonl", b"\xff\xfe\n"), expect=SAID_DAMAGED),
        row("metrics-empty", metrics(""), expect=SAID_DAMAGED),
        row(
            "metrics-of-a-later-version", metrics('{"format": 2}'), expect=done_and_said("1 line in metrics.jsonl of a")
        ),
        row("loss-a-text", metrics('{"step": 1, "epoch": 0.1, "loss": "x"}'), expect=SAID_DAMAGED),
        row("epoch-a-text", metrics('{"step": 1, "loss": 1, "epoch": "x"}'), expect=SAID_DAMAGED),
        row("seconds-a-text", metrics('{"step": 1, "epoch": 0.1, "seconds": "x"}'), expect=SAID_DAMAGED),
        row("step-without-bounds", metrics('{"step": 1e400, "epoch": 0.1}'), expect=SAID_DAMAGED),
        row("step-of-5000-digits", metrics('{"step": 1' + "0" * 5000 + "}"), expect=SAID_DAMAGED),
        row(
            "loss-of-400-digits", metrics('{"step": 1, "epoch": 0.1, "loss": 1' + "0" * 400 + "}"), expect=SAID_DAMAGED
        ),
        row("loss-nan", metrics('{"step": 1, "epoch": 0.1, "loss": NaN}'), expect=done_and_said("not finite")),
        row("huge-numbers", metrics('{"step": 1, "epoch": 1e-320, "seconds": 1e308}')),
        row("epoch-zero", metrics('{"step": 1, "epoch": 0}'), expect=done()),
        row(
            "epoch-zero-by-epochs",
            lambda run: (recipe("\nsteps = 8", "\nsteps = 0")(run), metrics('{"step":1,"epoch":0}')(run)),
        ),
        row("size-of-no-layers", metrics('{"step": 1, "epoch": 0.1, "encoder/0x0": 1}'), expect=done()),
        row("checkpoint-of-no-number", lambda run: checkpoint(run, "step_\u00b2"), expect=done()),
        row("checkpoint-of-200-digits", lambda run: checkpoint(run, "step_" + "9" * 200), expect=done()),
        row("steps-a-text", recipe("\nsteps = 8", '\nsteps = "x"'), expect=done_and_said("train.steps")),
        row("epochs-nan", recipe("epochs = 1.0", "epochs = nan"), expect=done_and_said("train.epochs")),
        row(
            "stop-at-step-a-list",
            recipe("stop_at_step = .*", "stop_at_step = []"),
            expect=done_and_said("stop_at_step"),
        ),
        row(
            "every-steps-a-text",
            recipe("every_steps = 2", 'every_steps = "x"'),
            expect=done_and_said("checkpoint.every"),
        ),
        row("train-a-number", lambda run: write(run / "recipe.toml", "train = 3\n[model]\nladder = [[1, 8]]\n")),
        row("ladder-huge", recipe(r"ladder = \[[^=]*\]\n", "ladder = [[2, 99999999999999999999], [1, 16]]\n")),
        row("ladder-inf", recipe(r"ladder = \[[^=]*\]\n", "ladder = [[1, inf]]\n"), expect=refused("recipe.toml")),
        row("recipe-deep", lambda run: write(run / "recipe.toml", "a = " + deep())),
        row("recipe-of-5000-digits", lambda run: write(run / "recipe.toml", "a = 1" + "0" * 5000)),
        row(
            "recipe-a-folder",
            lambda run: ((run / "recipe.toml").unlink(), (run / "recipe.toml").mkdir()),
            expect=refused("run is no run"),
        ),
        row("stopped-no-json", stopped("x"), expect=SAID_DAMAGED),
        row("stopped-a-list", stopped("[]"), expect=SAID_DAMAGED),
        row("stopped-deep", stopped(deep()), expect=SAID_DAMAGED),
        row("stopped-a-folder", lambda run: ((run / "STOPPED").unlink(missing_ok=True), (run / "STOPPED").mkdir())),
        row("escape-codes", stopped('{"step": 4, "reason": "\\u001b[2J\\u001b]0;x\\u0007"}'), cause=26),
        row("escape-codes-in-a-task", metrics('{"step": 4, "evaluation/\\u001b[2J/mrr/1x16": 1}'), cause=26),
        row(
            "escape-codes-in-a-fault", metrics('{"step":4,"epoch":1,"skipped_steps":1,"fault":"\\u001b[2J"}'), cause=26
        ),
    ],
    either(done(), refused("run/")),
    NO_ESCAPES,
    cause=25,
)
def _(folder: Path, assets: Assets, damage: Callable[[Path], object]) -> Command:
    damage(assets.copy(assets.stopped_run, folder / "run"))
    return Command("launch.status", ("run",))


def checkpoint(run: Path, name: str) -> None:
    write(run / "checkpoints" / name / "manifest.json", "{}")


@family(
    "launch/status-unreadable",
    [
        row("recipe", "recipe.toml"),
        row("metrics", "metrics.jsonl"),
        row("folder", "."),
        row("checkpoints", "checkpoints"),
    ],
    either(done(), refused("run")),
)
def _(folder: Path, assets: Assets, path: str) -> Command:
    run = assets.copy(assets.stopped_run, folder / "run")
    (run / path).chmod(0)
    return Command("launch.status", ("run",), without_rights=True)


@family(
    "launch/status-watch",
    [row("nan", "nan"), row("inf", "inf"), row("huge", "1e300"), row("zero", "0"), row("below-zero", "-1")],
    refused("--watch"),
    cause=25,
)
def _(folder: Path, assets: Assets, seconds: str) -> Command:
    return Command("launch.status", (str(assets.run), f"--watch={seconds}"))


# ------------------------------------------------------------------------------------------------- node, plan, doctor


def node(name: str, *words: str, naming: str = "", cause: int | str = 25, **environment: str) -> Row:
    return row(name, words, environment, expect=refused(naming), cause=cause)


@family(
    "launch/node",
    [
        row("good", ("--", "true"), {}, expect=done()),
        row("binary-output", ("--", "printf", "\\377\\000"), {}, expect=done()),
        row("no-slurm", ("--", "true"), {"SLURM_NODEID": None}, expect=refused("SLURM_NODEID")),
        node("node-a-text", "--", "true", SLURM_NODEID="x", naming="SLURM_NODEID"),
        node("node-beyond-the-nodes", "--", "true", SLURM_NODEID="1", naming="SLURM_NODEID"),
        node("nodes-a-text", "--", "true", SLURM_NNODES="1(x2)", naming="SLURM_NNODES"),
        node("nodes-a-raised-two", "--", "true", SLURM_NNODES="\u00b2", naming="SLURM_NNODES"),
        node("command-that-is-not-there", "--", "/no/such", naming="/no/such"),
        node("command-that-is-a-folder", "--", "/usr", naming="/usr"),
        node("no-ranks", "--ranks=0", "--", "true", naming="--ranks"),
        node("fewer-ranks-than-none", "--ranks=-3", "--", "true", naming="--ranks"),
        node("logs-below-a-file", "--logs=file/x", "--", "true", naming="file"),
        node("logs-of-300-letters", "--logs=" + "x" * 300, "--", "true", naming="too long"),
    ],
)
def _(folder: Path, assets: Assets, words: tuple[str, ...], given: dict[str, str | None]) -> Command:
    write(folder / "file", "")
    place = {"SLURM_NODEID": "0", "SLURM_NNODES": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    words = ("--ranks", "1", "--logs", "logs", *words)
    return Command("launch.node", words, outputs=("logs",), environment={**place, **given})


@family(
    "launch/plan",
    [
        row("nodes-of-no-number", "--nodes=\u00b2"),
        row("nodes-beyond-all", "--nodes=1..1" + "0" * 400),
        row("nodes-of-5000-digits", "--nodes=1" + "0" * 5000),
        row("gpus-beyond-all", "--gpus-per-node=1" + "0" * 30),
        row("interconnect-nan", "--interconnect=nan"),
        row("interconnect-next-to-nothing", "--interconnect=1e-320"),
        row("share-next-to-nothing", "--link-share=1e-320"),
        row("interconnect-of-one-node", "--interconnect=10", "--nodes=1"),
        row("links-of-one-gpu", "--link-share=0.5", "--nodes=1", "--gpus-per-node=1"),
        row("share-nan", "--matrix-share=nan"),
        row("batch-beyond-all", "--batch-per-gpu=1" + "0" * 40),
        row("tokens-nan", "--document-tokens=nan"),
        row("model-deep", "--model=deep.json"),
        row("model-of-5000-digits", "--model=digits.json"),
        row("model-of-no-layers", "--model=layers.json"),
        row("model-beyond-all", "--model=huge.json"),
        row("model-a-list", "--model=list.json"),
        row("model-not-utf8", "--model=bytes.json"),
    ],
    misused(),
    cause="own",
)
def _(folder: Path, assets: Assets, *words: str) -> Command:
    sound: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 192}
    files = {
        "deep": deep(),
        "digits": '{"hidden_size": 1' + "0" * 5000 + "}",
        "layers": json.dumps({**sound, "num_hidden_layers": 0}),
        "huge": json.dumps({**sound, "hidden_size": 10**300}),
        "list": "[]",
        "bytes": b"\xff\xfe",
    }
    for name, content in files.items():
        write(folder / f"{name}.json", content)
    write(folder / "r.toml", tomli_w.dumps(recipe_values(assets.documents)))
    return Command("launch.plan", ("r.toml", "--vocabulary", "192", *words))


@family(
    "launch/doctor",
    [
        row("world-size-a-text", {"WORLD_SIZE": "x"}, (), expect=refused("WORLD_SIZE")),
        row("rank-a-raised-two", {"RANK": "\u00b2"}, (), expect=refused("RANK")),
        row("rank-beyond-the-ranks", {"RANK": "3", "WORLD_SIZE": "2"}, (), expect=refused("RANK")),
        row(
            "tasks-a-text", {"RANK": None, "SLURM_NTASKS": "x", "SLURM_PROCID": "0"}, (), expect=refused("SLURM_NTASKS")
        ),
        row("no-nodes", {"RANK": None, "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, (), expect=refused("SLURM_JOB_NODE")),
        row("timeout-nan", {}, ("--timeout-seconds=nan",), expect=refused("--timeout-seconds")),
        row("timeout-inf", {}, ("--timeout-seconds=inf",), expect=refused("--timeout-seconds")),
        row("free-nan", {}, ("--free-gib=nan",), expect=refused("--free-gib")),
        row("disk-beyond-all", {}, ("--disk-mib=1" + "0" * 30,), expect=refused("--disk-mib")),
        row("gpus-below-none", {}, ("--gpus=-1",), expect=refused("--gpus")),
    ],
    cause=25,
)
def _(folder: Path, assets: Assets, given: dict[str, str | None], words: tuple[str, ...]) -> Command:
    place: dict[str, str | None] = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    return Command("launch.doctor", ("--folder", "runs", *words), outputs=("runs",), environment={**place, **given})


@family(
    "launch/qualify",
    [
        row("page-and-json-alike", ("--output", "q.md", "--json", "runs/../q.md"), expect=refused("--json")),
        row("page-over-the-hostfile", ("--hostfile", "hosts", "--output", "hosts"), expect=refused("hostfile")),
        row("json-below-a-file", ("--json", "hosts/q.json"), expect=refused("--json")),
        row("folder-that-is-a-file", ("--folder", "hosts"), expect=refused("hosts")),
        row("hostfile-a-folder", ("--hostfile", "runs"), expect=refused("--hostfile")),
        row("hosts-of-one-device", ("--hostfile", "hosts"), expect=refused("leave --hostfile out", untouched=True)),
    ],
    cause="own",
)
def _(folder: Path, assets: Assets, words: tuple[str, ...]) -> Command:
    write(folder / "hosts", "localhost slots=2\n")
    (folder / "runs").mkdir()
    return Command("launch.qualify", ("--quick", "--only", "attention", *words))
