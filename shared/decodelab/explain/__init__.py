"""What people look at: figures, sliders, quizzes, and what a lesson needs around its cells.

It imports the other wings, and nothing but the notebooks imports it.
"""

from decodelab.explain import (
    cost_figures,
    drills,
    figures,
    load_figures,
    memory_figures,
    serving_figures,
)
from decodelab.explain.capacity_explorer import capacity_explorer
from decodelab.explain.cost_explorer import cost_explorer
from decodelab.explain.explorers import batch_context_explorer
from decodelab.explain.lesson import Lesson
from decodelab.explain.quiz import Quiz
from decodelab.explain.serving_lesson import ServingLesson, difference
from decodelab.explain.stepper import stepper

__all__ = [
    "Lesson",
    "Quiz",
    "ServingLesson",
    "batch_context_explorer",
    "capacity_explorer",
    "cost_explorer",
    "cost_figures",
    "difference",
    "drills",
    "figures",
    "load_figures",
    "memory_figures",
    "serving_figures",
    "stepper",
]
