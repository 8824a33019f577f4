"""Each folder holds the tests of the package folder of the same name; all tests share the modules of this folder."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
