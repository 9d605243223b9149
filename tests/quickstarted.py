"""What `finetune quickstart` leaves, for the tests that read it and go on from it."""

from pathlib import Path

from conftest import Finetune, once


def quickstarted(shared: Path, finetune: Finetune) -> Path:
    """The folder in which it ran once in this session; `said` is what it printed."""

    def make(place: Path) -> None:
        place.mkdir()
        done = finetune("quickstart", cwd=place).passed()
        (place / "said").write_text(done.stdout)

    return once(shared / "quickstart", make)
