"""Check what you wrote in one exercise, as its check cells do. The exit code is 0 when every task passes."""

import argparse

from minipaged.commands import CommandError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("number", metavar="NN", help="the exercise, as in 04")


def run(args: argparse.Namespace) -> int:
    from coursekit.exercises import find_exercise
    from coursekit.grading.notebook import grade_file

    try:
        exercise = find_exercise(args.number)
    except FileNotFoundError as error:
        raise CommandError(str(error)) from None
    has_passed = True
    for result in grade_file(exercise.path, exercise.number):
        print(result.text() + "\n", flush=True)
        has_passed &= result.passed
    return 0 if has_passed else 1
