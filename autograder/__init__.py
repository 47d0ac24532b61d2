"""The instructor's side of the course: release lessons, and grade what comes back with nbgrader.

nbgrader authors, keeps the gradebook, the formgrader and the export; the modules here are the steps
that are put into its pipelines by nbgrader_config.py, and the commands around it. Not the safe
grader: tests still run inside the student's kernel (README.md says what that allows).
"""
