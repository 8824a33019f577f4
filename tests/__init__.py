"""The tests mirror the packages. Modules of this folder, such as launcher, reference and run_folder, are shared."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
