"""Tables and colours are made from the text that the models saw, and change no letter of it."""

import time

import pytest

from desk.highlight import highlight_code
from desk.tables import Table, tables

PANDAS = """\
       city  amount
0  New York   10.50
1  Old Town    3.25

[2 rows x 2 columns]"""
R = """\
  mpg  cyl
1 21.0 6
2 22.8 4"""
TIBBLE = """\
# A tibble: 2 × 2
  name    age
  <chr> <dbl>
1 Bob       1
2 Alice     2"""
WIDE = """\
     a  b  \\
0    1  2
1    3  4

   c
0  5
1  6"""
FROM_HTML = "a | b\n0 | 1 | 2\n1 | 3 | 4"
MARKDOWN = "Before:\n\n| name | age |\n|---|---|\n| Bob | 1 |"


def found(text: str, aligned: bool = True) -> list[Table]:
    return list(tables(text.split("\n"), aligned))


@pytest.mark.parametrize(
    ("text", "rows", "lines"),
    [
        (PANDAS, [("", "city", "amount"), ("0", "New York", "10.50"), ("1", "Old Town", "3.25")], (0, 1, 2)),
        (R, [("", "mpg", "cyl"), ("1", "21.0", "6"), ("2", "22.8", "4")], (0, 1, 2)),
        (TIBBLE, [("", "name", "age"), ("1", "Bob", "1"), ("2", "Alice", "2")], (1, 3, 4)),
        (FROM_HTML, [("", "a", "b"), ("0", "1", "2"), ("1", "3", "4")], (0, 1, 2)),
        (MARKDOWN, [("name", "age"), ("Bob", "1")], (2, 4)),
    ],
)
def test_a_data_frame_is_a_table_whose_rows_know_their_lines(
    text: str, rows: list[tuple[str, ...]], lines: tuple[int, ...]
) -> None:
    [table] = found(text)
    assert list(table.rows) == rows
    assert table.lines == lines


def test_columns_that_pandas_continues_below_are_a_table_of_their_own() -> None:
    assert [table.rows for table in found(WIDE)] == [
        (("", "a", "b"), ("0", "1", "2"), ("1", "3", "4")),
        (("", "c"), ("0", "5"), ("1", "6")),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "Mean of a: 3\nMean of b: 4\nMean of c: 5",
        "0    1\n1    2\ndtype: int64",
        "      1 x = 2\n----> 2 y = 3\n      3 z = 4",
        "    a b\n  x 1 2\n  y 3 4",
        "a | b",
        "if a | b\nthen c | d | e | f",
        "  " + " ".join("c" * 30) + "\n" + "\n".join("1 " + " ".join("2" * 30) for _ in range(3)),
        "",
    ],
)
def test_what_is_no_data_frame_stays_text(text: str) -> None:
    assert found(text) == []


def test_prose_has_no_columns_made_by_spaces() -> None:
    assert found(PANDAS, aligned=False) == []


CODE = {
    "Python": 'def mean(x):\n    """Two\n    lines."""\n    return 1.5  # why\n',
    "R": "mean <- function(x) {\n  x$a[1] # why\n}\n\n",
    "SQL": "\n\nselect count(*) -- why\nfrom t where name = 'a''b'",
}
HOSTILE = [
    "\n<script>a</script>\t&lt;\n",
    "\u2028 \u202e\u0000",
    "'''" * 50,
    "`" * 900,
    "f'{" * 300,
    "\\" * 999,
    "(" * 999,
]


@pytest.mark.parametrize("language", [*CODE, "Julia", "Bash", "JavaScript", "Stata", ""])
def test_colours_change_no_letter(language: str) -> None:
    for code in (*CODE.values(), *HOSTILE):
        lines = highlight_code(code, language)
        assert ["".join(text for _, text in line) for line in lines] == code.split("\n")


@pytest.mark.parametrize(("language", "kinds"), [("Python", "kscn"), ("R", "kcn"), ("SQL", "ksc")])
def test_languages_are_coloured(language: str, kinds: str) -> None:
    assert {kind for line in highlight_code(CODE[language], language) for kind, _ in line} >= set(kinds)


def test_a_string_over_two_lines_is_a_string_on_both() -> None:
    lines = highlight_code(CODE["Python"], "Python")
    assert lines[1][-1] == ("s", '"""Two')
    assert lines[2][-1] == ("s", '    lines."""')


def test_what_takes_a_lexer_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("desk.highlight._MOST_S", 0.0)
    assert highlight_code("x = 1", "Python") == ((("", "x = 1"),),)


def test_no_text_of_the_length_that_is_shown_keeps_the_desk_busy() -> None:
    pieces = ["'", '"""', "f'{", "\\", "(", "`", "a ", "1e", "/*", "$"]
    for language in ("Python", "R", "SQL", "Julia", "Bash", "JavaScript"):
        for piece in pieces:
            text = "\n".join([piece * (900 // len(piece))] * 22)
            before = time.thread_time()
            highlight_code(text, language)
            assert time.thread_time() - before < 3, (language, piece)
