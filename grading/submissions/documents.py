"""Reads Word documents and PDFs as text, within limits of size, pages, nesting and time. Pictures are only counted.

If a file is an export of another file, such as a notebook's PDF, its text counts only once.

Both libraries are in an extra (`kvasir-inference[documents]`). Neither fetches anything that a document links to.
"""

import html
import io
import logging
import re
import unicodedata
import zipfile
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from grading.submissions.archives import MIB, Unreadable
from grading.submissions.notebooks import clean_source, html_to_text
from grading.submissions.submission import Submission, SubmissionPart
from producers.words import plural

# Limits for a Word document, which is a zip: uncompressed bytes, and number of files.
_MAX_EXPANDED, _MAX_FILES = 64 * MIB, 2_000
# Limits on the bytes and the tags of each XML file that is read.
_MAX_XML, _MAX_TAGS = 16 * MIB, 400_000
# Limits for a PDF. Operators are counted over all pages together.
_MAX_PAGES, _MAX_PAGE_BYTES, _MAX_OPERATORS = 300, 16 * MIB, 1_000_000
# Maximum number of times that forms and pictures are drawn, on all pages together.
_MAX_DRAWINGS = 5_000
# The first pattern finds a run of text in a Word document. The second finds what makes a run invisible: it is hidden,
# or white without a background, or at most 1 point high.
_RUN = re.compile(rb"<w:r(?:\s[^<>]*)?>(?:(?!</?w:r[\s>]).)*</w:r>", re.DOTALL)
_HIDDEN_RUN = re.compile(
    rb"\A(?!.*<w:(?:shd|highlight)\b).*<w:color w:val=\"[fF]{6}\"|<w:vanish/>|<w:sz w:val=\"[0-2]\"/>", re.DOTALL
)
# Word on the web names the main part document2.xml.
_SHOWN_PART = re.compile(r"word/(?:document|footnotes|endnotes)\d*\.xml")
_RUN_TEXT = re.compile(rb"<w:t(?:\s[^<>]*)?>([^<>]*)</w:t>")
# If the pages have fewer characters than this on average, they are probably scans or drawings.
_THIN_CHARS = 80
# A file whose label has one of these endings can be an export of another file.
_EXPORTS = ("(.pdf)", "(.docx)")
# Source files with more characters than this are not compared with exports.
_MAX_COMPARED = 1_000_000
# The text that is added when a notebook is printed: cell numbers, and a mark where a long line continues.
_PRINTED = re.compile(r"(?:\b(?:in|out) ?)?\[[\d ]*\]:|↪\s*→?")
_TYPESET = str.maketrans({**dict.fromkeys("‐‑‒–—―−", "-"), **dict.fromkeys("\"'`‘’“”„«»•", " "), "ˆ": "^", "∗": "*"})
# Markdown characters, which a rendered page does not show.
_MARKUP = re.compile(r"[*_#~|$\\\[\]()<>]+")
# Word writes UTF-8. In another encoding, the search for forbidden declarations could miss one of them.
_OTHER_ENCODING = re.compile(rb"<\?xml[^>]{0,200}encoding\s*=\s*[\"'](?!utf-8[\"']|us-ascii[\"'])", re.IGNORECASE)
_COMMAND = "pip install 'kvasir-inference[documents]'"


def read_docx(data: bytes, _suffix: str = "") -> Submission:
    """Read a Word document: headings, paragraphs, lists, tables, text boxes and notes. Raises Unreadable."""
    _check_package(data)
    try:
        import mammoth  # an extra
    except ImportError:
        raise Unreadable(
            f"Word documents can't be read because a package is missing: install it with {_COMMAND}"
        ) from None
    try:
        result = mammoth.convert_to_html(
            io.BytesIO(data), convert_image=mammoth.images.img_element(lambda _: {"src": ""})
        )
    except RecursionError:
        raise Unreadable("it is nested too deeply to be a document; save it again in Word") from None
    except Exception as error:  # noqa: BLE001  a damaged document raises a dozen kinds
        raise Unreadable(f"it is no Word document, or damaged ({type(error).__name__}); save it again") from None
    text, images = html_to_text(result.value)
    equations = sum("oMath" in message.message for message in result.messages)
    doubt = f"{plural(equations, 'equation')} in it can't be read" if equations else ""
    return text_document(text, images, doubt, _hidden_text(data))


def _hidden_text(data: bytes) -> str:
    """Return a doubt about text that Word does not show or that nobody can read, or ""."""
    archive = zipfile.ZipFile(io.BytesIO(data))
    body = b"".join(archive.read(name) for name in archive.namelist() if _SHOWN_PART.fullmatch(name))
    pieces = [text for run in _RUN.findall(body) if _HIDDEN_RUN.search(run) for text in _RUN_TEXT.findall(run)]
    text = html.unescape(b"".join(pieces).decode("utf-8", "replace")).strip()
    return f"hidden text: “{text[:80]}”" if text else ""


def _check_package(data: bytes) -> None:
    """Raise Unreadable if the document would take too much to read, or declares entities that expand to more text."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
        files = archive.infolist()
        if len(files) > _MAX_FILES or sum(file.file_size for file in files) > _MAX_EXPANDED:
            raise Unreadable("it is not read, because its content is larger than a document needs")
        for file in files:  # zipfile reads at most as many bytes as a file's declared size, even if that size is wrong
            if file.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise Unreadable("its compression is unusual and can't be read; save it again in Word")
            if file.filename.lower().endswith((".xml", ".rels")):
                _check_xml(archive.read(file))
    except Unreadable:
        raise
    except Exception as error:  # noqa: BLE001  a damaged zip raises a dozen kinds
        raise Unreadable(f"it is no Word document, or damaged ({type(error).__name__}); save it again") from None


def _check_xml(xml: bytes) -> None:
    if len(xml) > _MAX_XML or xml.count(b"<") > _MAX_TAGS:
        raise Unreadable("it contains more than a document needs; hand in only the text")
    if (
        b"<!DOCTYPE" in xml
        or b"<!ENTITY" in xml
        or b"\0" in xml
        or _OTHER_ENCODING.match(xml.lstrip(b"\xef\xbb\xbf \r\n"))
    ):
        raise Unreadable(
            "it is not read, because it declares entities or an unusual encoding, which no word processor does; "
            "save it again in Word"
        )


def read_pdf(data: bytes, _suffix: str = "") -> Submission:
    """Read a PDF's text, page by page. Raises Unreadable."""
    try:
        import pypdf  # an extra
    except ImportError:
        raise Unreadable(f"PDFs can't be read because a package is missing: install it with {_COMMAND}") from None
    bounds: dict[str, Any] = {
        "page_tree_maximum_entries": 10 * _MAX_PAGES,
        "zlib_maximum_output_length": _MAX_PAGE_BYTES,
        "lzw_maximum_output_length": _MAX_PAGE_BYTES,
        "run_length_maximum_output_length": _MAX_PAGE_BYTES,
        "stream_parsing_work_maximum_count": _MAX_OPERATORS,
        # pypdf silently leaves out text when it reaches this limit. The limit in `_PdfWork` is lower, so it is reached
        # first, and an error is raised.
        "xform_maximum_invocations_per_extraction": 2 * _MAX_DRAWINGS,
        "jbig2dec_binary": None,  # no external program is started
    }
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # pypdf's log messages would quote the student's text
    try:
        with pypdf.apply_configuration(**bounds):
            return _pdf(pypdf.PdfReader(io.BytesIO(data)))
    except Unreadable:
        raise
    except RecursionError:
        raise Unreadable("it is nested too deeply to be a document; export it again") from None
    except pypdf.errors.LimitReachedError:
        raise Unreadable("it is not read, because its content is larger than a document needs") from None
    except Exception as error:  # noqa: BLE001  a damaged document raises a dozen kinds
        raise Unreadable(f"it is not a PDF, or it is damaged ({type(error).__name__}); export it again") from None


def _pdf(reader: Any) -> Submission:
    if reader.is_encrypted and not reader.decrypt(""):
        raise Unreadable("it is encrypted; hand it in without a password")
    pages = reader.pages
    if len(pages) > _MAX_PAGES:
        raise Unreadable(
            f"it has {len(pages):,} pages, but at most {_MAX_PAGES} are read; hand in only the pages with the work"
        )
    work = _PdfWork()
    texts, images = [], 0
    for page in pages:
        texts.append(page.extract_text(visitor_operand_before=work.count))
        # pypdf swallows an error from inside a drawing, so the counts are checked here again.
        work.check()
        xobjects = page.get("/Resources", {}).get("/XObject", {})
        images += sum(xobjects[name].get("/Subtype") == "/Image" for name in xobjects)
    chars = sum(len(text.strip()) for text in texts)
    is_thin = chars < _THIN_CHARS * len(texts)
    doubt = f"{plural(chars, 'character')} of text on {plural(len(texts), 'page')}: it may be a scan" if is_thin else ""
    return text_document("\n\n".join(texts), images, doubt)


@dataclass(slots=True)
class _PdfWork:
    """Counts what the pages of a PDF have drawn so far.

    Nested drawings can multiply: each may draw another ten times.
    """

    operators: int = 0
    drawings: int = 0

    def count(self, operator: bytes, *_: object) -> None:
        """Count one operator. Raises as `check`."""
        self.operators += 1
        self.drawings += operator == b"Do"
        self.check()

    def check(self) -> None:
        """Raise Unreadable if there is more than a document needs."""
        if self.operators > _MAX_OPERATORS or self.drawings > _MAX_DRAWINGS:
            raise Unreadable("it contains more than a document needs; hand in only the text")


def without_exports(files: Sequence[tuple[str, Submission]]) -> list[tuple[str, Submission]]:
    """Remove repeated text from files that are exports of another file, such as a notebook's PDF. Files have labels.

    A line of such an export is kept only if it holds something new: a word, or two neighbouring words with other signs
    between them. Whole lines can't be compared, because pages break lines elsewhere.
    """
    sources = [part for label, file in files if not label.endswith(_EXPORTS) for part in file.parts]
    has_exports = len(sources) < sum(len(file.parts) for _, file in files)
    if not has_exports or sum(len(part.text) for part in sources) > _MAX_COMPARED:
        return [*files]
    known = {key for part in sources for key in _source_keys(part)}
    return [(label, _without_known(file, known) if label.endswith(_EXPORTS) else file) for label, file in files]


def _without_known(export: Submission, known: Set[object]) -> Submission:
    """Remove the lines that hold nothing new, if these are most of the export."""
    lines = [line for part in export.parts for line in part.text.split("\n") if len(_pairs(line)) > 1]
    new_lines = [line for line in lines if not _line_keys(line) <= known]
    if 3 * len(new_lines) > len(lines) or not lines:
        return export
    note = f"an export: all but {len(new_lines):,} of {plural(len(lines), 'line')} stand in another file and count once"
    return replace(
        export,
        parts=(replace(export.parts[0], text="\n".join(new_lines)),) if new_lines else (),
        notes=(*export.notes, note),
    )


def _pairs(text: str) -> list[tuple[str, str, str]]:
    """Return each word with the text up to the next word, and the next word; "" before the first and after the last.

    All dashes and quotes are treated alike, because typesetting changes them.
    """
    plain = _PRINTED.sub(" ", unicodedata.normalize("NFKC", text).casefold()).translate(_TYPESET)
    words = ["", *re.findall(r"\w+", plain), ""]
    return list(zip(words, re.split(r"\w+", plain), words[1:], strict=False))


def _line_keys(line: str) -> Set[object]:
    """Return what a page's line holds: pairs of words with the signs between them, and the signs at both ends."""
    first, *inner_pairs, last = _pairs(line)
    pairs = {(word, "".join(gap.split()), next_word) for word, gap, next_word in inner_pairs}
    return {*pairs, ("", first[1][-1:].strip(), first[2]), (last[0], last[1][:1].strip(), "")}


def _source_keys(part: SubmissionPart) -> Iterator[object]:
    """Yield the same for a source, for every place where a page may break its lines.

    Signs in prose may be markup that a page does not show.
    """
    for word, gap, next_word in _pairs(part.text):
        for shown in {gap, *((_MARKUP.sub("", gap), "") * (part.kind == "text"))}:
            yield word, "".join(shown.split()), next_word
            yield word, shown[:1].strip(), ""
            yield "", shown[-1:].strip(), next_word


def text_document(text: str, images: int = 0, *doubts: str) -> Submission:
    """Make a submission of one text. Pictures in it are only counted. `doubts` are what a person must look at."""
    text, inline_images = clean_source(text)
    parts = (SubmissionPart("text", text.strip("\n"), "text"),) if text.strip() else ()
    doubts = tuple(filter(None, doubts))
    return Submission("", "", parts, images + inline_images, doubts, doubtful_notes=doubts)
