"""nbgrader's settings for this course, used when nbgrader runs in this folder; see docs/teaching.md."""

from pathlib import Path

from nbgrader import preprocessors as steps

from coursekit.grading.nbgrader_plugin import Grade, RestoreCells

Path("grading").mkdir(exist_ok=True)  # git ignores it; nbgrader's database cannot be made without it

c = get_config()  # noqa: F821  nbgrader puts it here

c.CourseDirectory.course_id = "minipaged"
c.CourseDirectory.source_directory = "solutions"
c.CourseDirectory.release_directory = "exercises"
c.CourseDirectory.submitted_directory = "grading/submitted"
c.CourseDirectory.autograded_directory = "grading/autograded"
c.CourseDirectory.feedback_directory = "grading/feedback"
c.CourseDirectory.db_url = f"sqlite:///{Path('grading/gradebook.db').resolve()}"
c.ExportPlugin.to = "grading/grades.csv"
c.CourseDirectory.ignore = [".ipynb_checkpoints", "__pycache__", "src", "*.backup-*.ipynb"]

# The exercises are here already; without this nbgrader would leave them alone and learn nothing about them.
c.GenerateAssignment.force = True

c.Autograde.sanitize_preprocessors = [
    RestoreCells,
    steps.ClearOutput,
    steps.DeduplicateIds,
    steps.OverwriteKernelspec,
    steps.OverwriteCells,
    steps.CheckCellMetadata,
]
c.Autograde.autograde_preprocessors = [
    Grade,  # where nbgrader has Execute: no kernel runs what was handed in
    steps.LimitOutput,
    steps.SaveAutoGrades,
    steps.AssignLatePenalties,
    steps.CheckCellMetadata,
]
