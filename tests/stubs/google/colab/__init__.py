"""A stand-in for Colab's own package, which exists nowhere else: enough for a lesson to run on.

It behaves where a lesson may rely on it, and refuses what would need a person or Google's servers.
"""

from google.colab import output

__all__ = ["drive", "files", "output"]


class _Files:
    """`files.download` records; `files.upload` would open a dialogue."""

    def __init__(self) -> None:
        self.downloaded: list[str] = []

    def download(self, filename: str) -> None:
        self.downloaded.append(filename)

    def upload(self) -> dict:
        raise RuntimeError("a lesson must not ask for an upload: it stops Run All")


class _Drive:
    """`drive.mount` would ask for permission to read a student's files."""

    def mount(self, mountpoint: str) -> None:
        raise RuntimeError("a lesson must not mount a student's Drive")


files, drive = _Files(), _Drive()
