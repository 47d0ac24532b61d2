"""Where the course lives, read from pyproject.toml: the one place that says so."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
QUIZZES = Path("shared/decodelab/explain/quizzes")
GITHUB = "https://github.com/"


@dataclass(frozen=True, kw_only=True)
class Project:
    """The course's public address and version."""

    repository: str
    version: str

    def colab_url(self, lesson: str) -> str:
        """Return the link that opens a released lesson, at this version's tag, in Colab.

        Raises ValueError when the repository isn't on GitHub: Colab opens no other.
        """
        if not self.repository.startswith(GITHUB):
            raise ValueError(
                f"[project.urls] Repository is {self.repository}; Colab opens notebooks from "
                f"{GITHUB} only"
            )
        path = self.repository.removeprefix(GITHUB)
        return (
            f"https://colab.research.google.com/github/{path}/blob/v{self.version}"
            f"/lessons/{lesson}/{lesson}.ipynb"
        )

    def fill(self, text: str, lesson: str) -> str:
        """Replace {{REPOSITORY}}, {{VERSION}} and {{COLAB_URL}}."""
        if "{{" not in text:
            return text
        return (
            text.replace("{{REPOSITORY}}", self.repository)
            .replace("{{VERSION}}", self.version)
            .replace("{{COLAB_URL}}", self.colab_url(lesson))
        )


def read_project(root: Path = ROOT) -> Project:
    """Read address and version from `root`/pyproject.toml."""
    data = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = data["urls"]["Repository"].rstrip("/").removesuffix(".git")
    return Project(repository=repository, version=data["version"])
