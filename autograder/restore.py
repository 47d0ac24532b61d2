"""Put back the graded cells that a submission lost, wherever they stood."""

from uuid import uuid4

from nbconvert.exporters.exporter import ResourcesDict
from nbformat import NotebookNode
from nbgrader.preprocessors import OverwriteCells

from autograder.cells import nbgrader


class RestoreCells(OverwriteCells):
    """Restore changed cells as nbgrader does, and missing ones after their nearest neighbour.

    nbgrader itself looks for the place among graded cells only, and stops with a KeyError where a
    locked text stood before the missing cell.
    """

    def add_missing_grade_cells(
        self, nb: NotebookNode, resources: ResourcesDict
    ) -> tuple[NotebookNode, ResourcesDict]:
        source = self.gradebook.find_notebook(self.notebook_id, self.assignment_id)
        points = {cell.name: cell.max_score for cell in source.grade_cells}
        answers = {cell.name for cell in source.solution_cells}
        if not any(nbgrader(cell).get("grade_id") in {*points, *answers} for cell in nb.cells):
            raise RuntimeError(
                "the submission has none of the graded cells: their metadata was lost, as happens "
                "when cells are copied into a new notebook. Copy the answers into the released one."
            )
        place = 0
        for cell in source.source_cells:
            found = [i for i, c in enumerate(nb.cells) if nbgrader(c).get("grade_id") == cell.name]
            if found:
                place = found[-1] + 1
            elif cell.name in points:
                self.log.warning("Graded cell %s was missing: put back", cell.name)
                restored = self.missing_cell_transform(
                    cell, points[cell.name], is_solution=cell.name in answers
                )
                restored["id"] = uuid4().hex[:8]
                nb.cells.insert(place, restored)
                place += 1
        return nb, resources
