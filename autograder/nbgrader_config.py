"""nbgrader's settings for this course.

`python -m autograder.link` makes plain `nbgrader COMMAND LESSON` find this file. Without it, add
`--NbGrader.config_file=autograder/nbgrader_config.py` (nbgrader has no shorter flag for it).
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COURSE = ROOT / "course"
COURSE.mkdir(exist_ok=True)
# nbgrader imports the steps named below, and runs `alembic` by name to make its gradebook.
sys.path.insert(0, str(ROOT))
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])

c = get_config()  # noqa: F821  (nbgrader defines it)

c.CourseDirectory.root = str(ROOT)
c.CourseDirectory.source_directory = "solutions"
c.CourseDirectory.release_directory = "lessons"
c.CourseDirectory.submitted_directory = "course/submitted"
c.CourseDirectory.autograded_directory = "course/autograded"
c.CourseDirectory.feedback_directory = "course/feedback"
c.CourseDirectory.solution_directory = "course/solution"
c.CourseDirectory.db_url = f"sqlite:///{(COURSE / 'gradebook.db').as_posix()}"
c.CourseDirectory.course_id = "decodelab"
c.ExportPlugin.to = str(COURSE / "grades.csv")

# What a student gets.
OURS, THEIRS = "autograder.release_steps.", "nbgrader.preprocessors."
c.GenerateAssignment.preprocessors = [
    OURS + "CheckSource",
    OURS + "StoreQuizFeedback",
    OURS + "DropInstructorCells",
    OURS + "FillPlaceholders",
    THEIRS + "LockCells",
    OURS + "ClearAnswers",
    THEIRS + "ClearOutput",
    OURS + "KeepStudentMetadata",
    THEIRS + "CheckCellMetadata",
    THEIRS + "ComputeChecksums",
    THEIRS + "SaveCells",
    THEIRS + "ClearHiddenTests",
    THEIRS + "ClearMarkScheme",
    OURS + "TrimTests",
    THEIRS + "ComputeChecksums",
    THEIRS + "CheckCellMetadata",
]
c.ClearSolutions.code_stub = {"python": 'raise NotImplementedError("write your answer here")'}

# How a submission is graded. The order matters: measurements are taken before outputs are cleared;
# what did not run is failed, and warnings forgiven, before the grades are saved.
OURS = "autograder.grading_steps."
c.Autograde.sanitize_preprocessors = [
    "autograder.measurements.HarvestMeasurements",
    OURS + "DropWidgetState",
    THEIRS + "ClearOutput",
    THEIRS + "DeduplicateIds",
    THEIRS + "OverwriteKernelspec",
    "autograder.restore.RestoreCells",
    THEIRS + "CheckCellMetadata",
]
c.Autograde.autograde_preprocessors = [
    THEIRS + "Execute",
    OURS + "FailWhatDidNotRun",
    OURS + "ForgiveWarnings",
    THEIRS + "LimitOutput",
    OURS + "LimitBytes",
    THEIRS + "SaveAutoGrades",
    THEIRS + "AssignLatePenalties",
    THEIRS + "CheckCellMetadata",
]
# A tag of the student's must not skip a test; a test cell that was deleted comes back.
c.Execute.skip_cells_with_tag = ""
c.Execute.store_widget_state = False
c.Execute.timeout = 120
c.OverwriteCells.add_missing_cells = True

c.GenerateFeedback.preprocessors = [
    THEIRS + "GetGrades",
    OURS + "HideHiddenTests",
    "nbconvert.preprocessors.CSSHTMLHeaderPreprocessor",
]
