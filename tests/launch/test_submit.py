"""From a recipe or a chain to scripts, without Slurm: what is printed, what is refused, what is written."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from launch.job import Job, training_job
from launch.options import job_options, time_limit_seconds
from launch.submit import main, submit_all
from tests import ROOT
from tests.run_folder import contents
from trainer.config.load import load_recipe

ON_GPUS = ("--nodes=2", "--gpus-per-node=8")


CLEAN = '[run]\noutput = "runs/r"\n[model]\nsource = "m"\n[data]\nshards = ["shards"]\n[objective]\nname = "masked"\n'


def training_job_of(place: Path) -> Job:
    options = job_options({"gpus_per_node": 1}, where="here")
    return training_job(load_recipe(place / "r.toml"), options, where="r.toml", resume=False, chdir=place)


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder to submit from, with shards, an engine's settings and a recipe; and no Slurm in PATH."""
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/manifest.json").write_text("{}")
    (tmp_path / "ds_configs").mkdir()
    (tmp_path / "ds_configs/zero1.json").write_text("{}")
    (tmp_path / "r.toml").write_text(CLEAN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def scripts_of(capsys, *arguments: str) -> str:
    assert main([*arguments, "--dry-run"]) == 0
    return capsys.readouterr().out


def refusal(capsys, folder: Path, *arguments: str) -> str:
    """The one sentence of a refusal, which leaves everything as it was."""
    before = contents(folder)
    assert main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert contents(folder) == before
    return err


def check_shell(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    if shutil.which("shellcheck"):
        # SC1091: an activated environment is not followed.
        command = ["shellcheck", "--exclude=SC1091", "--shell=bash", "-"]
        done = subprocess.run(command, input=script, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.processes
def test_the_script_says_what_was_asked_for(place, capsys):
    (place / "v/bin").mkdir(parents=True)
    (place / "v/bin/activate").write_text("")
    options = ("--partition=gpu", "--account=a1", "--qos=long", "--constraint=h100&ib", "--time=1-00:00:00", "--mem=0")
    more = (
        "--cpus-per-task=96",
        "--sbatch=--exclusive",
        "--venv=v",
        "--module=cuda/12.4",
        "--setup=ulimit -l unlimited",
    )
    last = ("--env=NCCL_DEBUG=WARN x", "--signal-seconds=600", "--max-requeues=7", "--container=apptainer exec b.sif")
    script = scripts_of(capsys, "r.toml", *ON_GPUS, *options, *more, *last)
    check_shell(script)
    lines = script.splitlines()
    for line in (
        "#SBATCH --nodes=2",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --partition=gpu",
        "#SBATCH --account=a1",
        "#SBATCH --qos=long",
        "#SBATCH '--constraint=h100&ib'",
        "#SBATCH --time=1-00:00:00",
        "#SBATCH --mem=0",
        "#SBATCH --cpus-per-task=96",
        "#SBATCH --exclusive",
        "#SBATCH --signal=USR1@600",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=runs/r/job/001/slurm-%j.log",
        "module load cuda/12.4",
        "source v/bin/activate",
        "ulimit -l unlimited",
        "source runs/r/job/001/variables.sh  # sets NCCL_DEBUG",
        "max_requeues=7",
        "contained=yes",
    ):
        assert line in lines, line
    assert 'apptainer exec b.sif python -m trainer.pretrain --config "$job/recipe.toml" --resume auto' in script
    assert "--kill-on-bad-exit=1" in script and "@@" not in script and "unset SLURM_EXPORT_ENV" in script
    assert not (place / "runs").exists()


@pytest.mark.processes
def test_directives_come_before_any_command(place, capsys):
    """Slurm stops reading them at the first line that is neither empty nor a comment."""
    lines = scripts_of(capsys, "r.toml", *ON_GPUS).splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert not [line for line in lines[first:] if line.startswith("#SBATCH")]
    assert lines[0] == "#!/bin/bash"


@pytest.mark.processes
def test_fine_tuning_and_no_gpus(place, capsys):
    script = scripts_of(capsys, "r.toml", "--gpus-per-node=0", "--ranks-per-node=4", "--objective.name=contrastive")
    check_shell(script)
    assert "python -m trainer.finetune" in script
    assert "ranks=4 # a node" in script and "export DS_ACCELERATOR=cpu" in script and "--gpus-per-node" not in script
    assert "contained=no" in script


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("none.toml", *ON_GPUS), "none.toml"),
        (("r.toml",), "--gpus-per-node is not given"),
        (("r.toml", *ON_GPUS, "--train.stepz=3"), "unknown key train.stepz"),
        (("r.toml", *ON_GPUS, "--optim.lr=-1"), "optim.lr"),
        (("r.toml", *ON_GPUS, "--nodez=3"), "'--nodez' is not understood"),
        (("r.toml", "--nodes=0", "--gpus-per-node=1"), "--nodes 0 is too small"),
        (("r.toml", *ON_GPUS, "--train.global_batch_size=15"), "15 leaves some of 16 ranks"),
        (("r.toml", *ON_GPUS, "--time=tomorrow"), "--time tomorrow is no time limit"),
        (("r.toml", *ON_GPUS, "--time=5"), "leaves no time before the signal"),
        (("r.toml", *ON_GPUS, "--partition=a b"), "--partition a b is no name"),
        (("r.toml", *ON_GPUS, "--account=x\n#SBATCH --uid=0"), "is no name"),
        (("r.toml", *ON_GPUS, "--mem=lots"), "--mem lots is no size"),
        (("r.toml", *ON_GPUS, "--venv=nowhere"), "holds no bin/activate"),
        (("r.toml", *ON_GPUS, "--env=1X=s3cr3t"), "--env (number 1) is not of the form NAME=VALUE"),
        (("r.toml", *ON_GPUS, "--env=A=1", "--env=B=s3cr3t\nx"), "--env (number 2) is not of the form NAME=VALUE"),
        (("r.toml", *ON_GPUS, "--env=BARISTA_NOWHERE_SET"), "BARISTA_NOWHERE_SET is not set here"),
        (("r.toml", *ON_GPUS, "--envs=A=s3cr3t"), "'--envs' is not understood"),
        (("r.toml", *ON_GPUS, "--envs=A=s3cr3t.with.dots"), "'--envs' is not understood"),
        (("--enb", "A=s3cr3t", "r.toml", *ON_GPUS), "'--enb' is not understood"),
        (("r.toml", *ON_GPUS, "--sbatch=--signal=TERM"), "leave --signal out"),
        (("r.toml", *ON_GPUS, "--sbatch=--arr=0-3"), "leave --array out"),
        (("r.toml", *ON_GPUS, "--sbatch=--exclusive --nodes=4"), "leave --nodes out"),
        (("r.toml", *ON_GPUS, "--sbatch=--tasks-per-node=4"), "leave --tasks-per-node out"),
        (("r.toml", *ON_GPUS, "--sbatch=--time=1"), "give it as --time"),
        (("r.toml", *ON_GPUS, "--sbatch=--part=gpu"), "give it as --partition"),
        (("r.toml", *ON_GPUS, "--sbatch=--gpus-per-node=2"), "give it as --gpus-per-node"),
        (
            ("r.toml", *ON_GPUS, "--signal-seconds=65536"),
            "--signal-seconds 65536 is too large; it must be at most",
        ),
        (("r.toml", *ON_GPUS, f"--max-requeues={2**63}"), f"--max-requeues {2**63} is too large"),
        (("r.toml", *ON_GPUS, "--array-limit=2"), "array_limit is read by stages of task 'prepare' alone"),
        (("r.toml", *ON_GPUS, "--time=0"), "--time 0 is no time to run in"),
        (("r.toml", *ON_GPUS, "--sbatch=-N4"), "'-N4' is no long option"),
        (("r.toml", *ON_GPUS, "--sbatch=-a0-3"), "'-a0-3' is no long option"),
        (("r.toml", *ON_GPUS, "--sbatch=--exclusive -N4"), "'-N4' is no long option"),
        (("r.toml", *ON_GPUS, "--sbatch=--comment='a"), "leaves a quote open"),
        (("r.toml", *ON_GPUS, "--container=sing 'b.sif"), "leaves a quote open"),
        (("r.toml", *ON_GPUS, "--setup=if true"), "bash cannot read the script"),
        (("r.toml", *ON_GPUS, "--time=99999999999:00:00"), "is no time limit"),
        (("r.toml", *ON_GPUS, "--time=99999999:00:00"), "is more than ten years"),
        (("r.toml", *ON_GPUS, "--time=\u0663:00:00"), "is no time limit"),
        (("r.toml", *ON_GPUS, "--run.output=--wrap=x"), "begins with a dash"),
        (("r.toml", *ON_GPUS, "--run.output=runs/a\0b"), "a sign that has a meaning in Slurm's scripts"),
        (("r.toml", *ON_GPUS, "--run.output=runs/\udcff"), "is not UTF-8"),
        (("r.toml", *ON_GPUS, f"--run.output=runs/{'x' * 300}"), "is too long"),
        (("r.toml", *ON_GPUS, "--after=\u00b2"), "is no number of a job"),
        (("r.toml", *ON_GPUS, "--data.shards=http://u:s3cr3t@h/a"), "http://***@h/a holds a password"),
        (("r.toml", *ON_GPUS, "--data.shards=http://u:${BARISTA_P}@h/a"), "give it by --env BARISTA_P"),
        (("r.toml", *ON_GPUS, "--ranks-per-node=3"), "is for jobs without GPUs"),
        (("r.toml", *ON_GPUS, "--data.shards=nowhere"), "nowhere holds no finished shards"),
        (("r.toml", *ON_GPUS, "--engine.ds_config=none.json"), "none.json does not exist"),
        (("r.toml", *ON_GPUS, "--run.output=runs/50%"), "a sign that has a meaning in Slurm's scripts"),
        (("r.toml", *ON_GPUS, "--run.output=shards"), "no run of ours"),
        (("r.toml", *ON_GPUS, "--after=x"), "--after x is no number"),
        (("r.toml", "--chain=c.toml"), "either a recipe or --chain"),
        (("--chain=c.toml",), "c.toml"),
        (("r.toml", *ON_GPUS), "sbatch is not here"),
    ],
)
def test_refusals(place, capsys, monkeypatch, arguments, words):
    """Without Slurm, but with a bash."""
    (place / "bin").mkdir()
    (place / "bin/bash").symlink_to(shutil.which("bash"))
    monkeypatch.setenv("PATH", str(place / "bin"))
    said = refusal(capsys, place, *arguments)
    assert words in said and "s3cr3t" not in said


def test_a_working_folder_with_a_line_break_in_its_name(place, capsys, monkeypatch):
    """It would become a line of the script."""
    folder = place / "a\ntouch PWNED\nb"
    folder.mkdir()
    for name in ("r.toml", "shards", "ds_configs"):
        (folder / name).symlink_to(place / name)
    monkeypatch.chdir(folder)
    assert "holds a line break" in refusal(capsys, folder, "r.toml", *ON_GPUS, "--dry-run")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("record", "words"),
    [('{"job": "4', "is no JSON"), ("[]", "holds no JSON object"), ('{"job": 4}', "job = 4"), ('{"job": "-x"}', "job")],
)
def test_a_damaged_record_of_an_earlier_submission(place, capsys, own_path, record, words):
    fake_slurm(place, "echo 1")
    (place / "runs/r/job/001").mkdir(parents=True)
    (place / "runs/r/recipe.toml").write_text("")
    (place / "runs/r/job/001/environment.json").write_text(record)
    said = refusal(capsys, place, "r.toml", *ON_GPUS)
    assert "runs/r/job/001/environment.json" in said and words in said and "squeue --me" in said
    assert not (place / "bin/sbatch.calls").exists()


@pytest.mark.processes
def test_the_values_of_variables_are_their_owners(place, capsys, own_path, monkeypatch):
    """In one file that nobody else can read, which the script reads; what was not committed is as private."""
    fake_slurm(place, "echo 4242")
    monkeypatch.setenv("BARISTA_PASSWORD", "s3cr3t of here")
    subprocess.run("git init -q && git add r.toml && git -c user.name=a -c user.email=a@b commit -qm a", shell=True)
    with (place / "r.toml").open("ab") as file:
        file.write(b"# s3cr3t \xff\n")
    options = ("--env=WANDB_API_KEY=it's s3cr3t", "--env", "A=s3cr3t=2", "--env=BARISTA_PASSWORD")
    (place / "clean.toml").write_text(CLEAN)
    address = "--data.shards=http://u:${BARISTA_PASSWORD}@h/a"
    assert main(["clean.toml", *ON_GPUS, *options, address]) == 0
    printed = capsys.readouterr()
    job = place / "runs/r/job/001"
    tells = {path.name for path in (place / "runs").rglob("*") if path.is_file() and b"s3cr3t" in path.read_bytes()}
    assert tells == {"variables.sh", "uncommitted.diff"} and "s3cr3t" not in printed.out + printed.err
    assert {stat.S_IMODE(path.stat().st_mode) for path in job.iterdir()} == {0o600}
    assert b"\xff" in (job / "uncommitted.diff").read_bytes()
    record = json.loads((job / "environment.json").read_text())
    assert record["job"] == "4242"
    shown = ["--env=WANDB_API_KEY=***", "--env", "A=***", "--env=BARISTA_PASSWORD", address]
    assert record["command"][-5:] == shown
    read = 'source variables.sh; printf "%s|" "$WANDB_API_KEY" "$A" "$BARISTA_PASSWORD"'
    done = subprocess.run(["bash", "-c", read], cwd=job, capture_output=True, text=True, check=True)
    assert done.stdout == "it's s3cr3t|s3cr3t=2|s3cr3t of here|"


@pytest.mark.processes
def test_a_reader_that_goes_cancels_nothing(place, own_path, monkeypatch):
    """As in `| head -1`: the job is in the queue."""
    fake_slurm(place, "echo 4242")
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(sys, "stdout", os.fdopen(write, "w"))
    with pytest.raises(BrokenPipeError):
        submit_all([training_job_of(place)], after=None, argv=[], chdir=place)
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.close()
    assert (place / "runs/r/job/001/environment.json").is_file() and not (place / "bin/scancel.calls").exists()


@pytest.mark.processes
def test_a_run_that_has_begun_or_is_done(place, capsys):
    (place / "runs/r/checkpoints").mkdir(parents=True)
    (place / "runs/r/recipe.toml").write_text("")
    assert "go on with it by --resume" in refusal(capsys, place, "r.toml", *ON_GPUS, "--dry-run")
    (place / "runs/r/job/001").mkdir(parents=True)
    assert "job=runs/r/job/002" in scripts_of(capsys, "r.toml", *ON_GPUS, "--resume")
    (place / "runs/r/DONE").write_text("")
    assert "is done" in refusal(capsys, place, "r.toml", *ON_GPUS, "--resume")


TWIN = """[[stages]]
task = "prepare"
corpora = [{ kind = "documents", inputs = ["text"], output = "./shards/web/" }]
[[stages]]
task = "train\""""
CHAIN = """
output = "runs/c"
[options]
partition = "gpu"
gpus_per_node = 4
nodes = 3
[[stages]]
task = "prepare"
options = { gpus_per_node = 0, cpus_per_task = 16, array_limit = 2 }
[[stages.corpora]]
kind = "documents"
inputs = ["text/*.jsonl"]
output = "shards/web"
parts = 2
arguments = ["--tokenizer", "it's one"]
[[stages]]
task = "train"
recipe = "r.toml"
settings = ["data.shards=shards/web"]
[[stages]]
task = "evaluate"
arguments = ["--beir", "beir/scifact"]
export = "export"
"""


@pytest.fixture
def chain(place) -> Path:
    (place / "text").mkdir()
    for name in "abc":
        (place / f"text/{name}.jsonl").write_text("")
    (place / "c.toml").write_text(CHAIN)
    return place


@pytest.mark.processes
def test_a_chain(chain, capsys):
    """Parts take files in turn, and the recipe that names their folder is given the parts."""
    script = scripts_of(capsys, "--chain=c.toml", "--account=a1")
    prepare, train, evaluate = ("#!/bin/bash" + each for each in script.split("#!/bin/bash")[1:])
    for each in (prepare, train, evaluate):
        check_shell(each)
        assert "#SBATCH --account=a1" in each and "#SBATCH --partition=gpu" in each
    assert "#SBATCH --array=0-1%2" in prepare and "--gpus-per-node" not in prepare
    files = "text/a.jsonl text/c.jsonl --tokenizer 'it'\"'\"'s one' --output shards/web/part-000"
    assert f"0) command=(python -m data.prepare documents {files}) ;;" in prepare
    assert "1) command=(python -m data.prepare documents text/b.jsonl" in prepare
    assert "#SBATCH --gpus-per-node=4" in train
    assert ["--nodes=3" in each for each in (prepare, train, evaluate)] == [False, True, False]
    assert "trainer.evaluate sizes --model runs/r/model --beir beir/scifact" in evaluate
    assert "trainer.export --model runs/r/model --output export" in evaluate
    assert not (chain / "runs").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('task = "train"', 'task = "rain"'), "stage 2: task = 'rain' is unknown"),
        (('task = "train"', 'task = ["train"]'), "stage 2: task = ['train'] is unknown"),
        (("parts = 2", "parts = 4"), "parts = 4 of 3 files"),
        (("parts = 2", "parts = true"), "parts = True must be a whole number"),
        (("shards=shards/web", 'shards=shards/web", "data.weights=[1.0]'), "written in parts"),
        (('partition = "gpu"', 'partitions = "gpu"'), "unknown key partitions"),
        (("data.shards=shards/web", "data.shards=shards/wep"), "shards/wep holds no finished shards"),
        (('recipe = "r.toml"', ""), "recipe is not given"),
        (('output = "runs/c"', ""), "needs output"),
        (('kind = "documents"', 'kind = "docs"'), "kind = 'docs' is unknown"),
        (("cpus_per_task = 16", "nodes = 2"), "stage 1: nodes is read by stages of task 'train' alone"),
        (('export = "export"', "options = { max_requeues = 2 }"), "stage 3: max_requeues is read by stages of task"),
        (('"--tokenizer"', '"--out=x", "--tokenizer"'), "stage 1: arguments have --output, which output decides"),
        (('"--tokenizer"', '"--processes", "4"'), "stage 1: arguments have --processes, which cpus_per_task"),
        (('"--beir"', '"--model=m", "--beir"'), "stage 3: arguments have --model, which model decides"),
        (('[[stages]]\ntask = "train"', TWIN), "output = './shards/web/' is another corpus' too"),
    ],
)
def test_refused_chains(chain, capsys, change, words):
    text = CHAIN.replace(*change)
    if text == CHAIN:
        pytest.fail("the change changes nothing")
    (chain / "c.toml").write_text(text)
    assert words in refusal(capsys, chain, "--chain=c.toml", "--dry-run")


@pytest.mark.parametrize(
    ("task", "option"), [("prepare", "--array-limit=2"), ("train", "--nodes=2"), ("train", "--crash-requeues=3")]
)
def test_options_that_no_stage_reads_are_refused(chain, capsys, task, option):
    head, *stages = CHAIN.split("[[stages]]\n")
    kept = [stage for stage in stages if not stage.startswith(f'task = "{task}"')]
    model = 'model = "runs/r/model"\narguments = ["--beir"'
    text = "[[stages]]\n".join([head, *kept]).replace('arguments = ["--beir"', model)
    text = text.replace("nodes = 3\n", "") if task == "train" else text
    text = text.replace("shards/web", "shards/a") if task == "prepare" else text
    (chain / "c.toml").write_text(text)
    name, _, value = option.partition("=")
    said = refusal(capsys, chain, "--chain=c.toml", "--dry-run", "--after=7", option)
    assert f"{name} is read by stages of task '{task}' alone, and c.toml has none; leave it out" in said
    key = name.removeprefix("--").replace("-", "_")
    (chain / "c.toml").write_text(text.replace("[options]\n", f"[options]\n{key} = {value}\n"))
    said = refusal(capsys, chain, "--chain=c.toml", "--dry-run", "--after=7")
    assert f"key {key} of [options] is read by stages of task '{task}' alone, and c.toml has none; leave it out" in said


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        ('"text/*.jsonl"', '"https://u:s3cr3t@h/x.tar"', "stage 1: https://***@h/x.tar holds a password"),
        ('"text/*.jsonl"', '"https://h/x.tar?token=s3cr3t"', "stage 1: https://h/x.tar?token=*** holds a password"),
        ('"--tokenizer"', '"--tokenizer=https://u:s3cr3t@h"', "stage 1: --tokenizer=https://***@h holds a password"),
        ('"--beir"', '"--beir=https://u:s3cr3t@h"', "stage 3: --beir=https://***@h holds a password"),
        ("data.shards=shards/web", "data.shards=https://u:s3cr3t@h", "https://***@h holds a password"),
        ('"text/*.jsonl"', '"https://u:${BARISTA_P}@h/x.tar"', "stage 1 names the variable BARISTA_P; export it here"),
    ],
)
def test_secrets_in_a_chain_are_refused(chain, capsys, before, after, shown):
    """The printed script and the job's files would have them."""
    text = CHAIN.replace("parts = 2", "parts = 1").replace(before, after)
    assert after in text
    (chain / "c.toml").write_text(text)
    said = refusal(capsys, chain, "--chain=c.toml", "--dry-run")
    assert shown in said and "s3cr3t" not in said


@pytest.mark.processes
def test_a_chain_names_variables_in_place_of_secrets(chain, capsys, own_path):
    """Negative control: the value is in the one file that nobody else can read."""
    fake_slurm(chain, "echo 4242")
    address = "https://u:${BARISTA_P}@h/x.tar"
    text = CHAIN.replace("parts = 2", "parts = 1").replace('"text/*.jsonl"', f'"{address}"')
    (chain / "c.toml").write_text(text)
    assert main(["--chain=c.toml", "--env=BARISTA_P=s3cr3t"]) == 0
    printed = capsys.readouterr()
    assert f"documents '{address}'" in printed.out and "s3cr3t" not in printed.out + printed.err
    tells = {path for path in (chain / "runs").rglob("*") if path.is_file() and b"s3cr3t" in path.read_bytes()}
    assert {path.name for path in tells} == {"variables.sh"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in tells} == {0o600}


def test_a_setting_beside_a_chain_is_named_without_its_value(chain, capsys):
    said = refusal(capsys, chain, "--chain=c.toml", "--env.TOKEN=s3cr3t")
    assert "--env.TOKEN is a recipe's setting" in said and "s3cr3t" not in said


@pytest.mark.processes
@pytest.mark.parametrize("path", sorted((ROOT / "launch/chains").glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_chains(tmp_path, monkeypatch, capsys, path):
    """With what they prepare from in place, every stage has a script; an array asks for no GPUs."""
    for name in ("launch", "ds_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("fineweb/sample/10BT", "msmarco"):
        (tmp_path / name).mkdir(parents=True)
    for part in range(15):
        (tmp_path / f"fineweb/sample/10BT/{part:03d}.parquet").write_text("")
    monkeypatch.chdir(tmp_path)
    scripts = scripts_of(capsys, "--chain", str(path), "--gpus-per-node=2").split("#!/bin/bash")[1:]
    assert len(scripts) == 4
    for script in scripts:
        check_shell("#!/bin/bash" + script)
        assert ("#SBATCH --array" in script) != ("#SBATCH --gpus-per-node" in script)


@pytest.mark.processes
def test_other_options_of_sbatch_and_options_for_some_stages(chain, capsys):
    """Negative controls: sbatch's own --gpus is no abbreviation, and a chain's options are for those who read them."""
    option = "--gpus=1 --mem-per-cpu=2G"
    assert f"#SBATCH {option}" in scripts_of(capsys, "r.toml", *ON_GPUS, f"--sbatch={option}")
    assert "#SBATCH --signal=USR1@65535" in scripts_of(capsys, "r.toml", *ON_GPUS, "--signal-seconds=65535")
    script = scripts_of(capsys, "--chain=c.toml", "--array-limit=1", "--max-requeues=7")
    prepare, train, _ = script.split("#!/bin/bash")[1:]
    assert "#SBATCH --array=0-1%2" in prepare, "a stage's own options override the command line"
    assert "max_requeues=7" in train


@pytest.mark.processes
def test_a_stage_without_a_signal_may_be_short(chain, capsys):
    """Only training is told of its time limit before it comes."""
    for before, after in (("cpus_per_task = 16", 'time = "5"'), ('export = "export"', 'options = { time = "5" }')):
        (chain / "c.toml").write_text(CHAIN.replace(before, after))
        assert "#SBATCH --time=5" in scripts_of(capsys, "--chain=c.toml")
    (chain / "c.toml").write_text(CHAIN.replace('recipe = "r.toml"', 'recipe = "r.toml"\noptions = { time = "5" }'))
    assert "stage 2: --time 5 leaves no time before" in refusal(capsys, chain, "--chain=c.toml", "--dry-run")


@pytest.mark.processes
@pytest.mark.parametrize(("written", "named"), [("shards/web/", "shards/web"), ("shards/web", "./shards/web/")])
def test_a_folder_of_a_chain_by_two_spellings(chain, capsys, written, named):
    (chain / "c.toml").write_text(
        CHAIN.replace('output = "shards/web"', f'output = "{written}"').replace("shards=shards/web", f"shards={named}")
    )
    assert main(["--chain=c.toml", "--dry-run"]) == 0
    assert "--output shards/web/part-000" in capsys.readouterr().out


@pytest.mark.processes
def test_shards_that_a_chain_does_not_need_yet(chain, capsys):
    """Training that is done needs its shards no more, and another job may still write those of a chain that waits."""
    (chain / "c.toml").write_text(CHAIN.replace("data.shards=shards/web", "data.shards=gone"))
    assert "gone holds no finished shards" in refusal(capsys, chain, "--chain=c.toml", "--dry-run")
    assert "trainer.pretrain" in scripts_of(capsys, "--chain=c.toml", "--after=7")
    (chain / "runs/r").mkdir(parents=True)
    (chain / "runs/r/DONE").write_text("")
    script = scripts_of(capsys, "--chain=c.toml", "--resume")
    assert "trainer.pretrain" not in script and "trainer.evaluate sizes --model runs/r/model" in script


def fake_slurm(folder: Path, sbatch: str) -> None:
    """An sbatch that keeps its arguments, and a scancel that keeps its own."""
    (folder / "bin").mkdir()
    for name, body in (("sbatch", sbatch), ("scancel", ""), ("squeue", "")):
        path = folder / "bin" / name
        path.write_text(f'#!/bin/bash\necho "$*" >> {folder}/bin/{name}.calls\n{body}\n')
        path.chmod(0o755)
    os.environ["PATH"] = f"{folder / 'bin'}:{os.environ['PATH']}"


@pytest.fixture
def own_path(monkeypatch):
    monkeypatch.setenv("PATH", os.environ["PATH"])


@pytest.mark.processes
def test_what_is_written_and_how_it_is_chained(chain, capsys, own_path):
    fake_slurm(chain, f"wc -l < {chain}/bin/sbatch.calls")
    subprocess.run("git init -q && git add r.toml && git -c user.name=a -c user.email=a@b commit -qm a", shell=True)
    assert main(["--chain=c.toml"]) == 0
    printed = capsys.readouterr().out
    written = contents(chain / "runs")
    run = {
        f"r/{name}"
        for name in ("recipe.toml", *(f"job/001/{n}" for n in ("recipe.toml", "job.sbatch", "environment.json")))
    }
    others = {
        f"c/{stage}/{name}" for stage in ("01-prepare", "03-evaluate") for name in ("job.sbatch", "environment.json")
    }
    assert set(written) == run | others
    assert written["r/job/001/job.sbatch"].decode() in printed
    assert b'shards = [\n    "shards/web/part-000",\n    "shards/web/part-001",\n]' in written["r/recipe.toml"]
    record = written["r/job/001/environment.json"].decode()
    assert '"dirty": true' in record and '"job": "2"' in record and '"torch"' in record
    calls = [line.split() for line in (chain / "bin/sbatch.calls").read_text().splitlines()]
    assert [call[-1] for call in calls] == [
        f"runs/{name}/job.sbatch" for name in ("c/01-prepare", "r/job/001", "c/03-evaluate")
    ]
    waits = [[word for word in call if word.startswith(("--dependency", "--kill"))] for call in calls]
    assert waits == [[], *([f"--dependency=afterok:{number}", "--kill-on-invalid-dep=yes"] for number in (1, 2))]
    for call in calls:  # as arguments, too: SBATCH_PARTITION and its like override the lines of a script
        script = (chain / call[-1]).read_text()
        directives = {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")}
        assert directives < set(call) and {"--partition=gpu", "--requeue"} < directives


@pytest.mark.processes
def test_a_stage_that_is_submitted_again(chain, capsys, own_path):
    """In the folder of its first submission, of which nothing is left that the second did not have."""
    fake_slurm(chain, "echo Welcome; echo 4242")
    subprocess.run("git init -q && git add r.toml && git -c user.name=a -c user.email=a@b commit -qm a", shell=True)
    (chain / "r.toml").write_text(CLEAN + "# changed\n")
    assert main(["--chain=c.toml", "--env=A=1"]) == 0
    stage = {path.name for path in (chain / "runs/c/01-prepare").iterdir()}
    assert stage == {"environment.json", "job.sbatch", "uncommitted.diff", "variables.sh"}
    (chain / "r.toml").write_text(CLEAN)
    assert main(["--chain=c.toml", "--resume"]) == 0
    stage = {path.name for path in (chain / "runs/c/01-prepare").iterdir()}
    assert stage == {"environment.json", "job.sbatch"}
    assert capsys.readouterr().err.count("submitted as job 4242") == 6


@pytest.mark.processes
def test_a_job_takes_nothing_from_the_job_in_which_it_is_submitted(place, own_path, monkeypatch):
    """In an interactive job of 16 CPUs, srun would ask for 16 in a job that has 1."""
    fake_slurm(place, f"env > {place}/environment; echo 4242")
    monkeypatch.setenv("SLURM_CONF", "slurm.conf")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "16")
    for job, kept in (("", {"SLURM_CONF", "SLURM_CPUS_PER_TASK"}), ("41", {"SLURM_CONF"})):
        if job:
            monkeypatch.setenv("SLURM_JOB_ID", job)
        assert main(["r.toml", *ON_GPUS, f"--run.output=runs/r{job}"]) == 0
        names = {line.partition("=")[0] for line in (place / "environment").read_text().splitlines()}
        assert {name for name in names if name.startswith("SLURM_")} == kept and "HOME" in names


@pytest.mark.processes
def test_what_slurm_refuses_leaves_nothing(chain, capsys, own_path):
    """The third stage is refused: those before it are cancelled, and nothing that was written stays."""
    fake_slurm(
        chain,
        f'n=$(wc -l < {chain}/bin/sbatch.calls); [ $n -lt 3 ] && echo $n || {{ echo "no such qos" >&2; exit 1; }}',
    )
    assert main(["--chain=c.toml"]) == 2
    assert "no such qos" in capsys.readouterr().err
    assert (chain / "bin/scancel.calls").read_text() == "1 2\n"
    assert not (chain / "runs").exists()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("squeue", "words"),
    [
        ("echo 4242 R", "is still in the queue; wait for it, or scancel 4242"),
        (
            "echo slurm_load_jobs error: Unable to contact slurm controller >&2; exit 1",
            "contact slurm controller); try",
        ),
        ("echo slurm_load_jobs error: Invalid job id specified >&2; exit 1", ""),
        ("", ""),
    ],
)
def test_two_jobs_of_a_folder_are_never_in_the_queue(chain, capsys, own_path, squeue, words):
    """Also if squeue cannot say. Negative controls: a job that has ended, and one that Slurm has forgotten."""
    fake_slurm(chain, "echo 4242")
    assert main(["--chain=c.toml"]) == 0
    capsys.readouterr()
    (chain / "bin/squeue").write_text(f"#!/bin/bash\n{squeue}\n")
    if words:
        calls = (chain / "bin/sbatch.calls").read_text()
        assert main(["--chain=c.toml", "--resume"]) == 2
        said = capsys.readouterr().err
        assert words in said and "job 4242 of runs/c/01-prepare" in said
        assert (chain / "bin/sbatch.calls").read_text() == calls
    else:
        assert main(["--chain=c.toml", "--resume"]) == 0


@pytest.mark.processes
def test_what_slurm_refuses_changes_nothing_of_an_earlier_submission(chain, capsys, own_path):
    """The files of a stage that is submitted again are those of its last submission, its variables and record among
    them. Negative control: what Slurm takes replaces them.
    """
    fake_slurm(chain, f"[ -e {chain}/full ] && exit 1; echo 4242")
    assert main(["--chain=c.toml", "--env=A=1", "--cpus-per-task=3"]) == 0
    before = contents(chain / "runs")
    assert b"export A=1" in before["c/01-prepare/variables.sh"]
    (chain / "full").write_text("")
    assert main(["--chain=c.toml", "--resume", "--mem=1G"]) == 2
    assert contents(chain / "runs") == before
    assert {stat.S_IMODE(path.stat().st_mode) for path in (chain / "runs/c/01-prepare").iterdir()} == {0o600}
    (chain / "full").unlink()
    assert main(["--chain=c.toml", "--resume", "--mem=1G"]) == 0
    after = contents(chain / "runs")
    assert "c/01-prepare/variables.sh" not in after and b"--mem=1G" in after["c/01-prepare/job.sbatch"]


@pytest.mark.processes
def test_the_node_needs_nothing_but_python():
    """It runs outside containers, where nothing of ours is installed."""
    subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); import launch.node"],
        check=True,
    )


def test_the_node_runs_on_old_pythons():
    """Its syntax, at least, is Python 3.8's; the control is syntax that is not."""
    ast.parse((ROOT / "launch/node.py").read_text(), feature_version=(3, 8))
    with pytest.raises(SyntaxError):
        ast.parse("match a:\n    case 1:\n        pass", feature_version=(3, 8))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("2:00:00", 7200), ("1-2", 93600), ("1-2:30", 95400), ("1:2:3:4", None), ("x", None)],
)
def test_time_limits(text, seconds):
    assert time_limit_seconds(text) == seconds
