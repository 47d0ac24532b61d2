"""What people look at: figures, sliders, quizzes, and what a lesson needs around its cells.

It imports the other wings, and nothing but the notebooks imports it.
"""

from decodelab.explain import figures
from decodelab.explain.explorers import batch_context_explorer
from decodelab.explain.lesson import Lesson
from decodelab.explain.quiz import Quiz

__all__ = ["Lesson", "Quiz", "batch_context_explorer", "figures"]
