"""Mark a class: every submission in a folder, as a table for a spreadsheet and a report for each learner.

FOLDER holds one folder a learner, in it NN_name/NN_name.ipynb as nbgrader collects them, or NN_name.ipynb.
Run it in the repository's folder. An answer runs in a guarded process of its own, with limits on time and
memory; what that cannot hold off, and what to do about it, is in docs/teaching.md. The exit code is 0 when
everybody has a mark, whatever the mark.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from minipaged.commands import CommandError, in_words

DEFAULT_OUT = Path("grading") / "marks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="one folder a learner")
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_OUT, metavar="DIR", help="where to write (default: grading/marks)"
    )
    parser.add_argument("--json", action="store_true", help="print the marks for a program to read")


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from coursekit.exercises import find_exercises
    from coursekit.grading import gradebook, report
    from coursekit.grading.judge import Judge
    from coursekit.grading.notebook import tasks_of

    try:
        names = [exercise.name for exercise in find_exercises()]
        submissions = gradebook.find_submissions(args.folder, names)
    except OSError as error:
        raise CommandError(in_words(error, args.folder)) from None
    names = gradebook.handed_in(submissions, names)
    total = len(submissions) * sum(len(tasks_of(name[:2])) for name in names)
    everybody = []
    with (
        report.files_in(args.out) as add,
        tqdm(total=total, unit="item", disable=None, leave=False) as bar,
        Judge() as judge,
    ):
        for marks in gradebook.grade_class(submissions, names, bar.update, judge.grade_file):
            add(marks)
            everybody.append(marks)
    if args.json:
        print(json.dumps([asdict(marks) for marks in everybody], indent=2))
        return 0
    print("\n".join(report.table(everybody, names)))
    for marks in everybody:
        for note in marks.notes:
            print(report.printable(f"{marks.student}: {note}"))
    for path in gradebook.loose_files(args.folder):
        print(report.printable(f"not graded, it lies in no learner's folder: {path.name}"))
    print(f"\n{args.out / 'grades.csv'} has every item, {args.out / 'reports'} a report for each learner.")
    return 0
