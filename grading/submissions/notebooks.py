"""Reads a Jupyter notebook (nbformat 3 or 4) into parts: code, text and text outputs, in the order of its cells.

It is parsed as plain JSON, so that a notebook with small errors can still be read. Notebook and cell metadata never
become part of the text, because they hold authors' names. Pictures are left out and counted.
"""

import html
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from grading.submissions.archives import MIB, Unreadable, replace_controls
from grading.submissions.cell_marks import is_given, nbgrader_of, without_hidden_tests
from grading.submissions.submission import PartKind, Submission, SubmissionPart
from grading.submissions.visible import visible_text
from producers.words import plural

# A student can change the name of the kernel in a notebook, so only the names in this table are used.
_LANGUAGES = {
    "r": "R",
    "ir": "R",
    "python": "Python",
    "ipython": "Python",
    "sql": "SQL",
    "julia": "Julia",
    "stata": "Stata",
    "sas": "SAS",
    "matlab": "MATLAB",
    "octave": "Octave",
    "javascript": "JavaScript",
    "bash": "Bash",
    "scala": "Scala",
    "c++": "C++",
    "java": "Java",
}
_V3_MIME = {
    "text": "text/plain",
    "html": "text/html",
    "latex": "text/latex",
    "png": "image/png",
    "jpeg": "image/jpeg",
    "svg": "image/svg+xml",
    "pdf": "application/pdf",
}
_V3_OUTPUT = {"pyout": "execute_result", "pyerr": "error"}
_PICTURES = ("image/", "application/pdf", "application/vnd.plotly", "application/vnd.vega")
_WIDGET = "application/vnd.jupyter.widget"
_OBJECT = re.compile(r"<[^<>\n]{1,200}>")  # what Python prints for an object that only HTML can show

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]{0,1000}(?:\x07|\x1b\\)|[@-Z\\-_])")
_DATA_URI = re.compile(r"data:[\w.+-]{1,60}/[\w.+-]{1,60};base64,[A-Za-z0-9+/=%]*")
_ANY_TAG = re.compile(r"<[!?/]?[A-Za-z][^<>]*>|<!?--|<[!/A-Za-z][^<>]*\Z")
_SPACE = re.compile(r"\s+")
# A character reference with so many digits can't be valid, and Python refuses to convert very long numbers.
_LONG_REFERENCE = re.compile(r"&#[0-9]{9,};?")
_CELL_END = re.compile(r"</t[dh]\b[^<>]*>", re.IGNORECASE)
_BREAK = re.compile(
    r"</?(?:br|p|div|tr|table|thead|tbody|ul|ol|li|dl|dt|dd|pre|h[1-6]|hr|caption)\b[^<>]*>", re.IGNORECASE
)
# Limits on how much of one notebook is read. Prompts contain far less than this, and every later step goes through
# everything that was read.
_MAX_BYTES = 16 * MIB  # without pictures
_MAX_STRINGS, _MAX_VALUES, _MAX_NESTS = 600_000, 600_000, 200_000
# Limits in characters, before cleaning: for all parts of one kind together, and for one part.
_MAX_SCANNED, _MAX_PART = 4 * MIB, 720_000
_MAX_MARKUP = MIB // 2
# Maximum number of accents and other combining marks on one letter, which is also Unicode's limit. The time to sort the
# marks of a letter grows with the square of their number.
_MAX_MARKS = 30
# Possessive quantifiers store no backtracking points. Other quantifiers would store one for each escape sequence, and a
# string can have 60 MiB.
_IN_STRING = rb'[^"\\]*+(?:\\.[^"\\]*+)*+"'
_PICTURE = re.compile(rb'("(?:image/[a-z.+-]{1,40}|application/pdf|png|jpeg)"\s{0,9}:\s{0,9}")' + _IN_STRING)
_STRING = re.compile(b'"' + _IN_STRING)
_LEFT_OUT = b'"[a very long text is left out here]"'
_PICTURE_TAG = re.compile(r"""<(img|canvas)\b(?:[^<>"']|"[^"<]*+"|'[^'<]*+')*+>""", re.IGNORECASE)
_DRAWING = re.compile(r"<svg\b", re.IGNORECASE)


def read_notebook(text: str) -> Submission:
    """Read the parts of a notebook. Raises Unreadable if it is not valid JSON, or is not a notebook."""
    notebook = _load_json(text)
    cells = _cells(notebook)
    reader = _NotebookReader(counts_runs=any(as_dict(cell).get("execution_count") is not None for cell in cells))
    for number, cell in enumerate(cells, 1):
        reader.read_cell(number, cell)
    return reader.submission(notebook)


def pictures_in(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the location of each PNG and JPEG of a notebook, and its unchecked base64.

    The location has the form of a part's location. Raises Unreadable, as `read_notebook`.
    """
    for number, cell in enumerate(_cells(_load_json(text)), 1):
        location = f"cell {number}"
        outputs = _merge_streams(as_list(as_dict(cell).get("outputs")))
        attachment_forms = [(location, as_dict(files)) for files in as_dict(as_dict(cell).get("attachments")).values()]
        output_forms = [
            (_of_output(location, index, outputs), as_dict(output.get("data")))
            for index, output in enumerate(outputs, 1)
        ]
        # An output can contain the same picture in several formats, so only one of them is taken.
        for place, forms in (*attachment_forms, *output_forms):
            if kind := next((kind for kind in ("image/png", "image/jpeg") if kind in forms), ""):
                yield place, forms[kind]


def cells_of(text: str) -> list[dict[str, Any]]:
    """Return the cells that are JSON objects, in the form of nbformat 4. Raises Unreadable, as `read_notebook`."""
    return [cell for cell in _cells(_load_json(text)) if isinstance(cell, dict)]


def slim_notebook(data: bytes, placeholder_for: Callable[[bytes], bytes] = lambda _: b"") -> bytes:
    """Replace each picture's base64 in the file by `placeholder_for(base64)`.

    Raises Unreadable if what remains would take seconds and gigabytes to read.
    """
    data = _PICTURE.sub(lambda match: match[1] + placeholder_for(match[0][len(match[1]) : -1]) + b'"', data)
    too_many = Unreadable("it holds too many values for a notebook; clear its outputs and hand it in again")
    if data.count(b'"') > 2 * _MAX_STRINGS:
        raise too_many
    # An interactive chart can contain a JavaScript library of several megabytes as one string.
    if len(data) > _MAX_BYTES:
        data = _STRING.sub(lambda match: match[0] if len(match[0]) < MIB else _LEFT_OUT, data)
    if len(data) > _MAX_BYTES:
        raise Unreadable(
            f"it is larger than {_MAX_BYTES // MIB} MiB even without its pictures; clear its outputs and hand it "
            "in again"
        )
    bare = _STRING.sub(b"", data)
    if bare.count(b",") > _MAX_VALUES or bare.count(b"[") + bare.count(b"{") > _MAX_NESTS:
        raise too_many
    return data


def language_name(name: object) -> str:
    """Return the name of a kernel's or code chunk's language, such as `R`, `Python` or `SQL`; "" if it is unknown."""
    return _LANGUAGES.get(name.strip().lower().rstrip("0123456789."), "") if isinstance(name, str) else ""


def clean_source(text: str) -> tuple[str, int]:
    """Make code or prose safe to send on. Returns it with the number of inline base64 pictures that were removed."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", "\n").replace("\v", "\n")
    text, images = _DATA_URI.subn("[image left out]", text)
    text = text if text.isascii() else _long_marks().sub(r"\1", text)
    return replace_controls(text), images


@cache
def _long_marks() -> re.Pattern[str]:
    """Return a pattern that matches runs of combining marks longer than any letter needs."""
    marks = "".join(chr(code) for code in range(0x300, 0x1F000) if unicodedata.combining(chr(code)))
    return re.compile(f"([{marks}]{{{_MAX_MARKS}}})[{marks}]+")


def water_level(sizes: Sequence[int], budget: int) -> int:
    """Return the largest share for which the sum of min(size, share) is within the budget."""
    remaining_budget = budget
    for index, size in enumerate(sorted(sizes)):
        share = remaining_budget // (len(sizes) - index)
        if size > share:
            return share
        remaining_budget -= size
    return max(sizes, default=0)


def shorten(text: str, max_chars: int) -> str:
    """Cut a text to its beginning and end if it has more than `max_chars` characters. A line between them says so."""
    if len(text) <= max_chars:
        return text
    head, tail = max_chars * 3 // 5, len(text) - max_chars * 2 // 5
    return f"{text[:head]}\n[… {tail - head:,} characters left out here …]\n{text[tail:]}"


def clean_output(text: str) -> tuple[str, int]:
    """Return output as a terminal would show it, without ANSI codes.

    Of a line that was overwritten, only the last state is kept.
    """
    text = _ANSI.sub("", text)
    if "\r" in text:
        text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return clean_source(text)


def without_header(text: str) -> str:
    """Remove a leading YAML header, where R Markdown and Quarto keep the author's name."""
    first_line, *lines = text.lstrip("\ufeff \n").split("\n")
    end = next((index for index, line in enumerate(lines) if line.rstrip() in ("---", "...")), -1)
    return "\n".join(lines[end + 1 :]) if first_line.rstrip() == "---" and end >= 0 else text


def _load_json(text: str) -> dict[str, Any]:
    try:
        notebook = json.loads(text, strict=False)
    except (RecursionError, MemoryError):
        raise Unreadable("it is nested too deeply to be a notebook; save it again in Jupyter") from None
    except json.JSONDecodeError as error:
        raise Unreadable(f"it is not valid JSON: {error}; save it again in Jupyter") from None
    except ValueError:  # a number has more digits than Python can convert
        raise Unreadable("it is not a notebook, because it contains a number with thousands of digits") from None
    if not isinstance(notebook, dict):
        raise Unreadable("it is not a notebook, because its JSON is not an object")
    return notebook


def _cells(notebook: Mapping[str, Any]) -> list[Any]:
    """Return the cells in the form of nbformat 4."""
    cells, sheets = notebook.get("cells"), notebook.get("worksheets")
    if isinstance(cells, list):
        return cells
    if isinstance(sheets, list):
        lists = [as_dict(sheet).get("cells") for sheet in sheets]
        return [_from_v3(cell) for cells in lists if isinstance(cells, list) for cell in cells]
    raise Unreadable("it is not a notebook, because it has no list of cells, which nbformat 3 and 4 require")


def _from_v3(cell: Any) -> Any:
    if not isinstance(cell, dict):
        return cell
    if cell.get("cell_type") == "heading":
        return {**cell, "cell_type": "markdown"}
    if cell.get("cell_type") != "code":
        return cell
    return {
        **cell,
        "source": cell.get("input"),
        "execution_count": cell.get("prompt_number"),
        "outputs": [_output_from_v3(output) for output in as_list(cell.get("outputs"))],
    }


def _output_from_v3(output: Any) -> Any:
    if not isinstance(output, dict):
        return output
    kind = output.get("output_type")
    return {
        **output,
        "output_type": _V3_OUTPUT.get(kind, kind) if isinstance(kind, str) else "",
        "data": {mime: output[key] for key, mime in _V3_MIME.items() if key in output},
    }


@dataclass(slots=True)
class _NotebookReader:
    """Collects the parts and counts of one notebook."""

    parts: list[SubmissionPart] = field(default_factory=list)
    images: int = 0
    never_run: int = 0
    counts_runs: bool = False  # whether at least one cell has an execution count
    failed_cells: int = 0
    unknown_cells: int = 0
    language: str = ""  # the language of the first code cell that states one (nbformat 3)
    markup: int = _MAX_MARKUP  # number of characters of HTML that can still be read before the limit is reached
    scanned_chars: Counter[PartKind] = field(default_factory=Counter)
    # Locations of the hidden tests that were left out.
    hidden_tests: list[str] = field(default_factory=list)
    # Locations where it is uncertain whether the text left out is a hidden test, because nbgrader has not marked the
    # cell as graded.
    doubtful: list[str] = field(default_factory=list)

    def submission(self, notebook: Mapping[str, Any]) -> Submission:
        metadata = as_dict(notebook.get("metadata"))
        kernel, info = as_dict(metadata.get("kernelspec")), as_dict(metadata.get("language_info"))
        names = (info.get("name"), kernel.get("language"), kernel.get("name"), self.language)
        language = next(filter(None, map(language_name, names)), "")
        outputs_without_run = sum(part.has_no_run for part in self.parts)
        counts = (
            (self.never_run, ("code cell", "was never run", "were never run")),
            (
                outputs_without_run,
                ("output", "has no run that could have made it", "have no run that could have made it"),
            ),
            (self.failed_cells, ("code cell", "ended in an error", "ended in an error")),
            (self.unknown_cells, ("cell", "of no known kind left out", "of no known kind left out")),
        )
        notes = [
            "kernel missing" if not any(names) else "" if language else "kernel's language not known",
            *(plural(count, *words) for count, words in counts if count),
            f"hidden tests left out ({', '.join(self.hidden_tests)})" if self.hidden_tests else "",
        ]
        return Submission(
            "",
            language,
            tuple(self.parts),
            self.images,
            tuple(filter(None, notes)),
            doubtful_notes=(f"left out as hidden tests ({', '.join(self.doubtful)}): is it?",) * bool(self.doubtful),
        )

    def read_cell(self, number: int, cell: Any) -> None:
        location = f"cell {number}"
        kind = as_dict(cell).get("cell_type")
        if kind == "code":
            self._code(location, cell)
        elif kind in ("markdown", "raw"):
            source, is_given_cell = self._source(location, cell)
            self._add("text", without_header(source) if number == 1 else source, location, is_given_cell)
            self.images += len(as_dict(cell.get("attachments")))
        else:
            self.unknown_cells += 1

    def _code(self, location: str, cell: Mapping[str, Any]) -> None:
        source, is_given_cell = self._source(location, cell)
        # The outputs of a cell with hidden tests are left out, because the traceback of an error would show the tests.
        has_hidden_tests = location in self.hidden_tests
        outputs = [] if has_hidden_tests else _merge_streams(as_list(cell.get("outputs")))
        self.language = self.language or language_name(cell.get("language"))
        self.never_run += bool(source.strip()) and cell.get("execution_count") is None and not outputs
        self.failed_cells += any(output.get("output_type") == "error" for output in outputs)
        self._add("code", source, location, is_given_cell)
        for index, output in enumerate(outputs, 1):
            self._add(
                "output",
                self._output(output),
                _of_output(location, index, outputs),
                has_no_run=not source.strip() or (self.counts_runs and cell.get("execution_count") is None),
            )

    def _source(self, location: str, cell: Mapping[str, Any]) -> tuple[str, bool]:
        """Return a cell's text without hidden tests, and whether the student was given it in this form."""
        source = join_lines(cell.get("source"))
        visible_source = without_hidden_tests(cell["cell_type"], source)
        if visible_source != source:
            self.hidden_tests.append(location)
            self.doubtful += [] if nbgrader_of(cell).get("grade") else [location]
        return visible_source, is_given(cell, source)

    def _output(self, output: Mapping[str, Any]) -> str:
        kind = output.get("output_type")
        if kind == "stream":
            return join_lines(output.get("text"))
        if kind == "error":
            trace = "\n".join(line for line in as_list(output.get("traceback")) if isinstance(line, str))
            return trace or f"{join_lines(output.get('ename'))}: {join_lines(output.get('evalue'))}"
        return self._data(as_dict(output.get("data")))

    def _data(self, data: Mapping[str, Any]) -> str:
        """Return the text of one result that comes in several forms. A plot in three formats counts as one picture."""
        if any(mime.startswith(_WIDGET) for mime in data):
            return ""
        plain, markup = join_lines(data.get("text/plain")), join_lines(data.get("text/html"))
        markup, self.markup = markup[: self.markup], max(0, self.markup - len(markup))
        html_text, images = html_to_text(markup)
        self.images += any(mime.startswith(_PICTURES) for mime in data) or images
        if plain.strip() and not (html_text and _OBJECT.fullmatch(plain.strip())):
            return plain
        return html_text or join_lines(data.get("text/markdown")) or join_lines(data.get("text/latex"))

    def _add(
        self, kind: PartKind, text: str, location: str, is_given_cell: bool = False, *, has_no_run: bool = False
    ) -> None:
        space = min(_MAX_PART, _MAX_SCANNED - self.scanned_chars[kind])
        self.scanned_chars[kind] += min(len(text), space)
        text = shorten(text, space)
        text, images = clean_output(text) if kind == "output" else clean_source(text)
        self.images += images
        if text.strip():
            self.parts.append(SubmissionPart(kind, text.strip("\n"), location, is_given_cell, has_no_run=has_no_run))


def _of_output(location: str, index: int, outputs: Sequence[Any]) -> str:
    return f"{location}, output" if len(outputs) == 1 else f"{location}, output {index}"


def _merge_streams(outputs: list[Any]) -> list[dict[str, Any]]:
    """Join neighbouring pieces of one output stream: kernels send a line or less at a time."""
    result: list[dict[str, Any]] = []
    pieces: list[str] = []
    for output in outputs:
        if not isinstance(output, dict):
            continue
        text = join_lines(output.get("text")) if output.get("output_type") == "stream" else None
        keys = ("output_type", "name", "stream")
        if text is not None and result and all(result[-1].get(key) == output.get(key) for key in keys):
            pieces.append(text)
            result[-1]["text"] = pieces
        else:
            pieces = [text or ""]
            result.append(dict(output))
    return result


def join_lines(value: Any) -> str:
    """Join nbformat's multi-line string, which is one string or a list of them."""
    if isinstance(value, str):
        return value
    return "".join(line for line in value if isinstance(line, str)) if isinstance(value, list) else ""


def as_dict(value: Any) -> dict[str, Any]:
    """Return a JSON value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """Return a JSON value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def html_to_text(markup: str) -> tuple[str, int]:
    """Return the text of HTML that a browser shows, and the number of pictures.

    There is one line for each table row or block.
    """
    # A picture's tag stays, so that the picture is counted. Its alternative text is removed, because a browser does not
    # show it.
    markup = _PICTURE_TAG.sub(r"<\1>", markup)
    shown = visible_text(markup, "html").shown(markup, with_markup=True)
    text = _ANY_TAG.sub("", _BREAK.sub("\n", _CELL_END.sub(" | ", _SPACE.sub(" ", shown))))
    lines = html.unescape(_LONG_REFERENCE.sub("\ufffd", text)).split("\n")
    images = len(_PICTURE_TAG.findall(shown)) + len(_DRAWING.findall(markup))
    return "\n".join(bare for line in lines if (bare := " ".join(line.split()).strip(" |"))), images
