"""Splits a header into words with their places, and evaluates its integer expressions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from rocmega.errors import ToolchainError

TOKEN = re.compile(
    r"(?P<space>\s+|//[^\n]*|/\*.*?\*/)"
    r"|(?P<directive>\#[^\n]*)"
    r"|(?P<number>0[xX][0-9a-fA-F']+[uUlL]*|0[bB][01']+[uUlL]*|[0-9][0-9']*[uUlL]*(?![.\w]))"
    r'|(?P<string>"[^"\n]*")'
    r"|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<mark><<|>>|::|[-+*/%&|^~(){}\[\];:,=<>!])",
    re.DOTALL,
)
IGNORED_DIRECTIVE = re.compile(r"#\s*(pragma\s+once|include\s*[<\"][^>\"]*[>\"])\s*(//.*)?$")


@dataclass(frozen=True)
class Token:
    kind: str
    text: str
    line: int


@dataclass
class Tokens:
    """The words of a header and a position among them."""

    origin: str
    items: list[Token] = field(default_factory=list)
    at: int = 0

    @classmethod
    def of(cls, text: str, origin: str) -> Tokens:
        self = cls(origin)
        position, line = 0, 1
        while position < len(text):
            match = TOKEN.match(text, position)
            if match is None:
                word = re.match(r"\S+", text[position:])
                raise self.error(line, f"{word[0] if word else text[position]!r} is not understood")
            kind, found = str(match.lastgroup), match[0]
            if kind == "directive" and not IGNORED_DIRECTIVE.match(found.strip()):
                raise self.error(line, f"the directive {found.strip()!r} is not understood")
            if kind not in ("space", "directive"):
                self.items.append(Token(kind, found, line))
            line += found.count("\n")
            position = match.end()
        self.items.append(Token("end", "the end of the file", line))
        return self

    def error(self, line: int, message: str) -> ToolchainError:
        return ToolchainError(
            f"{self.origin}:{line}: {message}. A descriptor header holds constexpr integers, enums and plain structs "
            "of scalars, pointers, arrays and such structs; see rocmega/descriptor."
        )

    def fail(self, message: str) -> ToolchainError:
        return self.error(self.peek.line, message)

    @property
    def peek(self) -> Token:
        return self.items[self.at]

    def next(self) -> Token:
        token = self.items[self.at]
        if token.kind != "end":
            self.at += 1
        return token

    def take(self, text: str) -> bool:
        """Steps over the word if it is the next."""
        if self.peek.text == text and self.peek.kind != "end":
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.take(text):
            raise self.fail(f"expected {text!r}, found {self.peek.text!r}")

    def name(self, what: str) -> str:
        if self.peek.kind != "name":
            raise self.fail(f"expected {what}, found {self.peek.text!r}")
        return self.next().text


LEVELS = (("|",), ("^",), ("&",), ("<<", ">>"), ("+", "-"), ("*", "/", "%"))


def expression(tokens: Tokens, known: Mapping[str, int], level: int = 0) -> int:
    """An integer expression of literals, known names, parentheses and C's arithmetic and bit operators."""
    if level == len(LEVELS):
        return _operand(tokens, known)
    left = expression(tokens, known, level + 1)
    while tokens.peek.text in LEVELS[level]:
        operator = tokens.next()
        right = expression(tokens, known, level + 1)
        if operator.text in "/%" and (right == 0 or left < 0 or right < 0):
            raise tokens.error(operator.line, f"{left} {operator.text} {right} is not understood")
        left = {
            "|": lambda a, b: a | b,
            "^": lambda a, b: a ^ b,
            "&": lambda a, b: a & b,
            "<<": lambda a, b: a << b,
            ">>": lambda a, b: a >> b,
            "+": lambda a, b: a + b,
            "-": lambda a, b: a - b,
            "*": lambda a, b: a * b,
            "/": lambda a, b: a // b,
            "%": lambda a, b: a % b,
        }[operator.text](left, right)
    return left


def _operand(tokens: Tokens, known: Mapping[str, int]) -> int:
    if tokens.take("-"):
        return -_operand(tokens, known)
    if tokens.take("("):
        value = expression(tokens, known)
        tokens.expect(")")
        return value
    token = tokens.next()
    if token.kind == "number":
        digits = token.text.rstrip("uUlL").replace("'", "")
        # A leading 0 is octal in C and an error in Python.
        return int(digits, 8) if re.fullmatch(r"0[0-7]+", digits) else int(digits, 0)
    if token.kind == "name" and token.text in known:
        return known[token.text]
    raise tokens.error(token.line, f"expected an integer constant, found {token.text!r}")
