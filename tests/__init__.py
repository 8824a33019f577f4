"""The tests mirror the packages; what several of them share stands here and in launcher, reference and run_folder."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
