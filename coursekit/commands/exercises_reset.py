"""Start one exercise again: its notebook becomes what was handed out, and yours is kept beside it."""

import argparse

from minipaged.commands import CommandError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("number", metavar="NN", help="the exercise, as in 04")


def run(args: argparse.Namespace) -> int:
    from coursekit import exercises

    try:
        exercise = exercises.find_exercise(args.number)
        if not (made_from := exercise.original or exercise.source).is_file():
            raise FileNotFoundError(f"{made_from} is not here; the exercise is made from it")
    except FileNotFoundError as error:
        raise CommandError(str(error)) from None
    if exercises.is_as_handed_out(exercise):
        raise CommandError(f"{exercise.path} has not been changed: nothing to reset")
    backup = exercises.reset(exercise)
    print(f"{exercise.path} has been reset" + (f"; your version is saved as {backup}" if backup else ""))
    return 0
