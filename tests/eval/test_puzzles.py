import itertools

import pytest

from rocmega.eval.puzzles import LONGEST_ANSWER, LONGEST_PROMPT, TASKS, examination, puzzles


def solve(task: str, question: str) -> str:
    """The answer, from the text of the question alone."""
    match task:
        case "add" | "subtract" | "multiply":
            a, sign, b = next((*question.partition(sign),) for sign in "+-*" if sign in question)
            return str({"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign])
        case "copy":
            return question
        case "reverse":
            return "".join(reversed(question))
        case "sort":
            return "".join(sorted(question))
        case "count":
            letter, text = question.split()
            return str(text.count(letter))
        case "largest":
            return str(max(map(int, question.split(","))))
    *told, asked = question.split()
    return dict(pair.split(":") for pair in told)[asked]


@pytest.mark.parametrize("task", TASKS)
def test_each_puzzle_has_the_one_right_answer(task):
    for puzzle in itertools.islice(puzzles(task, 3, held_out=False), 200):
        name, _, question = puzzle.prompt.removesuffix("=").partition(" ")
        assert name == puzzle.task == task
        assert puzzle.answer == solve(task, question)
        assert puzzle.prompt.isascii()
        assert len(puzzle.prompt) <= LONGEST_PROMPT
        assert 0 < len(puzzle.answer) <= LONGEST_ANSWER


def test_no_puzzle_of_the_examination_is_trained_on():
    asked = examination(30)
    assert len(asked) == len({puzzle.prompt for puzzle in asked}) == 30 * len(TASKS)
    assert all(puzzle.held_out for puzzle in asked)
    for task in TASKS:
        trained = itertools.islice(puzzles(task, "any", held_out=False), 500)
        assert not {puzzle.prompt for puzzle in trained} & {puzzle.prompt for puzzle in asked}


def test_an_examination_is_a_matter_of_its_seed():
    assert examination(5, 1) == examination(5, 1)
    assert examination(5, 1) != examination(5, 2)
    assert examination(5, 1) == [puzzle for puzzle in examination(9, 1) if puzzle in examination(5, 1)]
