"""Where a record is written to: files that are found fit before anything is timed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def claim(targets: Mapping[str, str | Path | None]) -> None:
    """Makes the files to write, by the option that names them, or leaves them as they are.

    Raises:
        ValueError: a folder, or one file for two options.
        OSError: a file that cannot be written.
    """
    paths = {option: Path(target) for option, target in targets.items() if target is not None}
    for option, path in paths.items():
        if path.is_dir():
            raise ValueError(f"{option} must be a file, and {str(path)!r} is a folder")
    if len({path.resolve() for path in paths.values()}) < len(paths):
        raise ValueError(f"{' and '.join(paths)} must be two files, got {str(path)!r} for both")
    for path in paths.values():
        path.touch()
